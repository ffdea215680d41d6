#include "schedule/sim/jackson.h"

#include <algorithm>
#include <queue>

namespace thinwire::sim {

double JacksonBound(const std::vector<Job>& jobs) {
  std::vector<Job> waiting = jobs;
  std::sort(waiting.begin(), waiting.end(),
            [](const Job& a, const Job& b) { return a.release < b.release; });
  const auto shorter_tail = [](const Job& a, const Job& b) { return a.tail < b.tail; };
  std::priority_queue<Job, std::vector<Job>, decltype(shorter_tail)> released(shorter_tail);
  double now = 0.0, end = 0.0;
  size_t next = 0;
  while (next < waiting.size() || !released.empty()) {
    if (released.empty()) now = std::max(now, waiting[next].release);
    while (next < waiting.size() && waiting[next].release <= now) released.push(waiting[next++]);
    Job job = released.top();
    released.pop();
    // Until it ends, or until another is released, which may have a longer tail.
    const bool ends = next == waiting.size() || now + job.length <= waiting[next].release;
    const double run = ends ? job.length : waiting[next].release - now;
    now += run;
    job.length -= run;
    if (ends) {
      end = std::max(end, now + job.tail);
    } else {
      released.push(job);
    }
  }
  return end;
}

}  // namespace thinwire::sim
