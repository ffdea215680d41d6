// Limits how much of an exhaustive test a build runs. With a sanitizer everything takes ten times
// as long, and the errors that it finds do not depend on every value: bad addresses depend on the
// length modulo a block or a vector, races on the schedule. The release build runs everything.
#ifndef THINWIRE_TESTS_EFFORT_H_
#define THINWIRE_TESTS_EFFORT_H_

#include <cstddef>

namespace thinwire {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Number of random rounds.
constexpr int Rounds(int all) { return kSanitized ? all / 10 : all; }

// Number of training steps; each but the first uses the state that the step before left.
constexpr int Steps(int all) { return kSanitized ? 3 : all; }

// Number of elements of a tensor that is cut into many chunks. A few chunks interact in every way
// that many do.
constexpr size_t Elements(size_t all) { return kSanitized ? all * 3 / 10 : all; }

// Returns true if the combination of values with this number is tried: with a sanitizer every third
// one. Callers number combinations so that every pair of values still occurs.
constexpr bool IsTried(size_t number) { return !kSanitized || number % 3 == 0; }

// Returns the next length to test after `numel`, up to 4097. If `few`, all lengths up to about four
// blocks of 256, then only those around a whole number of blocks.
constexpr size_t NextLength(size_t numel, bool few = kSanitized) {
  const bool last_of_run = few && numel > 1100 && numel % 256 == 3;
  return last_of_run ? numel + 250 : numel + 1;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_EFFORT_H_
