// Residuals follow parameters through any re-bucketing, and nothing is lost on the way.
#include "compress/error_feedback.h"

#include <gtest/gtest.h>

#include <cmath>

namespace thinwire {
namespace {

BucketLayout Layout(std::vector<Segment> segments, std::vector<Range> owned, float weight = 4.0f) {
  return {std::move(segments), std::move(owned), weight, false};
}

TEST(ErrorFeedback, SameLayoutIsALookUp) {
  ErrorFeedback feedback;
  const auto layout = Layout({{"a", 0, 10, 10, 0}}, {{0, 5}});
  const auto values = feedback.Bind("bucket", layout)->residual;
  EXPECT_EQ(values[7], 0.0f);
  values[7] = 3.0f;
  EXPECT_EQ(feedback.Bind("bucket", layout)->residual, values);
}

// Such as topk's thresholds: another bucket of the same parameters has other chunks.
TEST(ErrorFeedback, WhatIsCarriedStaysWithTheLayout) {
  ErrorFeedback feedback;
  auto layout = Layout({{"a", 0, 10, 10, 0}}, {});
  EXPECT_EQ(feedback.Bind("bucket", layout)->carried, nullptr);
  layout.carried = 2;
  {
    const auto carried = feedback.Bind("bucket", layout)->carried;
    EXPECT_EQ(carried[0], 0.0f);
    carried[1] = 3.0f;
    EXPECT_EQ(feedback.Bind("bucket", layout)->carried, carried);
  }
  EXPECT_EQ(feedback.Bind("other", layout)->carried[1], 0.0f);
}

TEST(ErrorFeedback, MovesWithTheParameterAndConvertsTheHop) {
  ErrorFeedback feedback;
  auto before =
      feedback.Bind("0", Layout({{"a", 0, 4, 4, 0}, {"b", 0, 4, 4, 0}}, {{2, 6}}))->residual;
  for (int i = 0; i < 8; ++i) before[i] = static_cast<float>(i + 1);
  const auto elsewhere = Layout({{"b", 0, 4, 4, 0}}, {{2, 4}});
  EXPECT_TRUE(absl::IsFailedPrecondition(feedback.Bind("1", elsewhere).status()))
      << "while somebody holds the old place";
  before.reset();
  // b moves to another bucket, where its other half is owned.
  const auto after = feedback.Bind("1", elsewhere)->residual;
  EXPECT_EQ(after[0], 5.0f * 4);  // was second hop, is first: times n
  EXPECT_EQ(after[1], 6.0f * 4);
  EXPECT_EQ(after[2], 7.0f / 4);  // was first hop, is second: over n
  EXPECT_EQ(after[3], 8.0f / 4);
  ParameterResidual a;
  ASSERT_TRUE(feedback.Export("a", &a).ok());
  EXPECT_EQ(a.first, (std::vector<float>{1, 2, 0, 0}));
  EXPECT_EQ(a.second, (std::vector<float>{0, 0, 3, 4}));
}

TEST(ErrorFeedback, AParameterMaySpanBuckets) {
  ErrorFeedback feedback;
  const auto left = feedback.Bind("0", Layout({{"a", 0, 3, 6, 0}}, {}))->residual;
  const auto right = feedback.Bind("1", Layout({{"a", 3, 3, 6, 0}}, {}))->residual;
  left[1] = 5.0f;
  right[2] = 7.0f;
  ParameterResidual a;
  ASSERT_TRUE(feedback.Export("a", &a).ok());
  EXPECT_EQ(a.first, (std::vector<float>{0, 5, 0, 0, 0, 7}));
}

TEST(ErrorFeedback, ExportAndImportGiveTheVeryBitsBack) {
  const auto layout = Layout({{"a", 0, 4, 4, 0}}, {{0, 2}}, 3.0f);
  ErrorFeedback one, two;
  const auto values = one.Bind("0", layout)->residual;
  const float odd[] = {0.1f, -0.0f, -0.0f, 1.0f / 3};
  std::copy(odd, odd + 4, values.get());
  ParameterResidual a;
  ASSERT_TRUE(one.Export("a", &a).ok());
  ASSERT_TRUE(two.Import("a", a).ok());
  EXPECT_EQ(two.Names(), std::vector<std::string>{"a"});
  const auto back = two.Bind("0", layout)->residual;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(back[i], odd[i]);
    EXPECT_EQ(std::signbit(back[i]), std::signbit(odd[i])) << i;
  }
}

TEST(ErrorFeedback, UnknownNamesAreAnError) {
  ErrorFeedback feedback;
  ParameterResidual residual;
  EXPECT_TRUE(absl::IsInvalidArgument(feedback.Export("nobody", &residual)));
  EXPECT_EQ(feedback.Numel("nobody"), 0u);
}

}  // namespace
}  // namespace thinwire
