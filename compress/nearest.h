// The word that somebody probably meant, for error messages.
#ifndef THINWIRE_COMPRESS_NEAREST_H_
#define THINWIRE_COMPRESS_NEAREST_H_

#include <string>
#include <string_view>
#include <vector>

namespace thinwire {

// The first of `names` with the smallest edit distance; there is at least one name.
std::string NearestOf(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_NEAREST_H_
