// Residuals follow parameters through any re-bucketing, and nothing is lost on the way.
#include "compress/error_feedback.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace thinwire {
namespace {

BucketLayout Layout(std::vector<Segment> segments, std::vector<Range> owned, float weight = 4.0f) {
  BucketLayout layout;
  layout.segments = std::move(segments);
  layout.owned = std::move(owned);
  layout.second_hop_weight = weight;
  return layout;
}

TEST(ErrorFeedback, SameLayoutIsALookUp) {
  ErrorFeedback feedback;
  const auto layout = Layout({{"a", 0, 10, 10, 0}}, {{0, 5}});
  const auto values = (*feedback.Bind("bucket", layout))->residual;
  EXPECT_EQ(values[7], 0.0f);
  values[7] = 3.0f;
  EXPECT_EQ((*feedback.Bind("bucket", layout))->residual, values);
}

// Carried values, such as topk's thresholds, start at zero in another bucket: its chunks differ.
TEST(ErrorFeedback, WhatIsCarriedStaysWithTheLayout) {
  ErrorFeedback feedback;
  auto layout = Layout({{"a", 0, 10, 10, 0}}, {});
  EXPECT_EQ((*feedback.Bind("bucket", layout))->carried, nullptr);
  layout.carried = 2;
  {
    const auto carried = (*feedback.Bind("bucket", layout))->carried;
    EXPECT_EQ(carried[0], 0.0f);
    carried[1] = 3.0f;
    EXPECT_EQ((*feedback.Bind("bucket", layout))->carried, carried);
  }
  EXPECT_EQ((*feedback.Bind("other", layout))->carried[1], 0.0f);
}

TEST(ErrorFeedback, MovesWithTheParameterAndConvertsTheHop) {
  ErrorFeedback feedback;
  auto before = *feedback.Bind("0", Layout({{"a", 0, 4, 4, 0}, {"b", 0, 4, 4, 0}}, {{2, 6}}));
  for (int i = 0; i < 8; ++i) before->residual[i] = static_cast<float>(i + 1);
  const auto elsewhere = Layout({{"b", 0, 4, 4, 0}}, {{2, 4}});
  EXPECT_TRUE(absl::IsFailedPrecondition(feedback.Bind("1", elsewhere).status()))
      << "while somebody holds the old place";
  before.reset();
  // b moves to another bucket, where this rank owns the other half of it.
  const auto after = (*feedback.Bind("1", elsewhere))->residual;
  EXPECT_EQ(after[0], 5.0f * 4);  // from second hop to first: times n
  EXPECT_EQ(after[1], 6.0f * 4);
  EXPECT_EQ(after[2], 7.0f / 4);  // from first hop to second: divided by n
  EXPECT_EQ(after[3], 8.0f / 4);
  ParameterResidual a;
  ASSERT_TRUE(feedback.Export("a", &a).ok());
  EXPECT_EQ(a.first, (std::vector<float>{1, 2, 0, 0}));
  EXPECT_EQ(a.second, (std::vector<float>{0, 0, 3, 4}));
}

TEST(ErrorFeedback, AParameterMaySpanBuckets) {
  ErrorFeedback feedback;
  const auto left = (*feedback.Bind("0", Layout({{"a", 0, 3, 6, 0}}, {})))->residual;
  const auto right = (*feedback.Bind("1", Layout({{"a", 3, 3, 6, 0}}, {})))->residual;
  left[1] = 5.0f;
  right[2] = 7.0f;
  ParameterResidual a;
  ASSERT_TRUE(feedback.Export("a", &a).ok());
  EXPECT_EQ(a.first, (std::vector<float>{0, 5, 0, 0, 0, 7}));
}

TEST(ErrorFeedback, ExportAndImportGiveTheVeryBitsBack) {
  const auto layout = Layout({{"a", 0, 4, 4, 0}}, {{0, 2}}, 3.0f);
  ErrorFeedback one, two;
  const auto values = (*one.Bind("0", layout))->residual;
  const float odd[] = {0.1f, -0.0f, -0.0f, 1.0f / 3};
  std::copy(odd, odd + 4, values.get());
  ParameterResidual a;
  ASSERT_TRUE(one.Export("a", &a).ok());
  ASSERT_TRUE(two.Import("a", a).ok());
  ASSERT_EQ(two.parameters().size(), 1u);
  EXPECT_EQ(two.parameters()[0].name, "a");
  const auto back = (*two.Bind("0", layout))->residual;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(back[i], odd[i]);
    EXPECT_EQ(std::signbit(back[i]), std::signbit(odd[i])) << i;
  }
}

TEST(ErrorFeedback, ArraysOfAnyNameFollowTheirParameter) {
  ErrorFeedback feedback;
  auto layout = Layout({{"a", 0, 4, 4, 0}, {"b", 0, 2, 2, 0}}, {{1, 5}});
  layout.arrays = {"exp_avg", "exp_avg_sq"};
  {
    const auto memory = *feedback.Bind("0", layout);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(memory->array(1)[i], 0.0f) << "at first";
      memory->array(0)[i] = static_cast<float>(i);
      memory->array(1)[i] = static_cast<float>(10 + i);
    }
  }
  std::vector<float> average(2, -1), square(2, -1), other(2, -1);
  ASSERT_TRUE(
      feedback
          .Export(std::vector<StateArray>{
              {"b", "exp_avg", average}, {"b", "exp_avg_sq", square}, {"b", "other", other}})
          .ok());
  EXPECT_EQ(average, (std::vector<float>{4, 5}));
  EXPECT_EQ(square, (std::vector<float>{14, 15}));
  EXPECT_EQ(other, (std::vector<float>{0, 0})) << "not kept";
  // In another bucket the arrays are in another order.
  auto moved = Layout({{"b", 0, 2, 2, 0}}, {});
  moved.arrays = {"exp_avg_sq", "exp_avg"};
  const auto memory = *feedback.Bind("1", moved);
  EXPECT_EQ(memory->array(0)[1], 15.0f);
  EXPECT_EQ(memory->array(1)[1], 5.0f);
}

TEST(ErrorFeedback, AnImportReplacesAllThatIsKeptOfItsParametersAndNothingElse) {
  ErrorFeedback feedback;
  auto layout = Layout({{"a", 0, 2, 2, 0}, {"b", 0, 2, 2, 0}}, {{1, 3}});
  layout.arrays = {std::string(kMomentum)};
  {
    const auto memory = *feedback.Bind("0", layout);
    for (int i = 0; i < 4; ++i)
      memory->residual[i] = memory->array(0)[i] = static_cast<float>(i + 1);
    std::vector<float> values = {7, 8};
    EXPECT_TRUE(absl::IsFailedPrecondition(
        feedback.Import(std::vector<StateArray>{{"b", kFirstHop, values}}, 4.0f)))
        << "while somebody holds the memory";
  }
  std::vector<float> values = {7, 8}, three(3);
  EXPECT_TRUE(absl::IsInvalidArgument(feedback.Import(
      std::vector<StateArray>{{"a", kFirstHop, values}, {"b", kFirstHop, three}}, 4.0f)));
  ASSERT_TRUE(feedback.Import(std::vector<StateArray>{{"b", kFirstHop, values}}, 4.0f).ok());
  ParameterResidual a, b;
  ASSERT_TRUE(feedback.Export("a", &a).ok());
  ASSERT_TRUE(feedback.Export("b", &b).ok());
  EXPECT_EQ(a.first, (std::vector<float>{1, 0}));
  EXPECT_EQ(a.second, (std::vector<float>{0, 2}));
  EXPECT_EQ(a.array(kMomentum), (std::vector<float>{1, 2}));
  EXPECT_EQ(b.first, values);
  EXPECT_EQ(b.second, (std::vector<float>{0, 0}));
  EXPECT_EQ(b.array(kMomentum), std::vector<float>());
  const auto memory = *feedback.Bind("0", layout);
  EXPECT_EQ(memory->residual[1], 2.0f);
  EXPECT_EQ(memory->residual[2], 7.0f / 4);
  EXPECT_EQ(memory->residual[3], 8.0f);
  EXPECT_EQ(memory->array(0)[3], 0.0f);
}

TEST(ErrorFeedback, UnknownNamesAreAnError) {
  ErrorFeedback feedback;
  ParameterResidual residual;
  EXPECT_TRUE(absl::IsInvalidArgument(feedback.Export("nobody", &residual)));
  EXPECT_EQ(feedback.Numel("nobody"), 0u);
}

}  // namespace
}  // namespace thinwire
