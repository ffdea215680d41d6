// Effort: how much of an exhaustive test a build does. With a sanitizer everything takes ten times
// as long, and what it looks for does not depend on every value: addresses by the length modulo a
// block or a vector, races by the schedule. The release build does all.
#ifndef THINWIRE_TESTS_EFFORT_H_
#define THINWIRE_TESTS_EFFORT_H_

#include <cstddef>

namespace thinwire {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Random rounds.
constexpr int Rounds(int all) { return kSanitized ? all / 10 : all; }

// Training steps: each but the first uses what the one before has left behind.
constexpr int Steps(int all) { return kSanitized ? 3 : all; }

// Elements of a tensor that is cut into many chunks: a few chunks meet one another in every way
// that many do.
constexpr size_t Elements(size_t all) { return kSanitized ? all * 3 / 10 : all; }

// Says whether a combination of values is tried, by its number among all: with a sanitizer each
// third is. Callers count so that every pair of values still occurs.
constexpr bool IsTried(size_t number) { return !kSanitized || number % 3 == 0; }

// The length after this one, of all up to 4097. few: all up to some four blocks of 256, and then
// only those about a whole number of blocks.
constexpr size_t NextLength(size_t numel, bool few = kSanitized) {
  const bool last_of_run = few && numel > 1100 && numel % 256 == 3;
  return last_of_run ? numel + 250 : numel + 1;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_EFFORT_H_
