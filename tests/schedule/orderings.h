// The base of tests that hold for announced and predicted chunks, over planes of either matching.
#ifndef THINWIRE_TESTS_SCHEDULE_ORDERINGS_H_
#define THINWIRE_TESTS_SCHEDULE_ORDERINGS_H_

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "schedule/options.h"
#include "transport/planes.h"

namespace thinwire {

using Ordering = std::tuple<Matching, Predict>;

class OrderingTest : public testing::TestWithParam<Ordering> {
 protected:
  Matching matching() const { return std::get<0>(GetParam()); }
  Predict predict() const { return std::get<1>(GetParam()); }
};

inline auto AllOrderings() {
  return testing::Combine(testing::Values(Matching::kByTag, Matching::kByOrder),
                          testing::Values(Predict::kNever, Predict::kAlways));
}

inline std::string OrderingName(const testing::TestParamInfo<Ordering>& info) {
  return std::string(std::get<0>(info.param) == Matching::kByTag ? "ByTag" : "ByOrder") +
         (std::get<1>(info.param) == Predict::kAlways ? "Predicted" : "Announced");
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_ORDERINGS_H_
