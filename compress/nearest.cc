#include "compress/nearest.h"

#include <algorithm>
#include <utility>

namespace thinwire {
namespace {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

}  // namespace

std::string NearestOf(std::string_view wanted, const std::vector<std::string>& names) {
  return *std::min_element(names.begin(), names.end(), [&](auto& a, auto& b) {
    return EditDistance(wanted, a) < EditDistance(wanted, b);
  });
}

}  // namespace thinwire
