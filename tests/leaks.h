// Counts the descriptors and threads of this process, for tests that create and destroy things.
#ifndef THINWIRE_TESTS_LEAKS_H_
#define THINWIRE_TESTS_LEAKS_H_

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <ostream>
#include <thread>

namespace thinwire {

struct Held {
  size_t descriptors = 0, threads = 0;

  static Held Now() { return {Entries("/proc/self/fd"), Entries("/proc/self/task")}; }

  // Returns the count as soon as it is no more than `before`, or after 20 s: the kernel still lists
  // a thread for a moment after its join has returned.
  static Held Settled(const Held& before) {
    Held held = Now();
    for (int wait = 0; wait < 2000 && !(held <= before); ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      held = Now();
    }
    return held;
  }

  bool operator<=(const Held& other) const {
    return descriptors <= other.descriptors && threads <= other.threads;
  }

  friend std::ostream& operator<<(std::ostream& out, const Held& held) {
    return out << held.descriptors << " descriptors and " << held.threads << " threads";
  }

 private:
  static size_t Entries(const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_LEAKS_H_
