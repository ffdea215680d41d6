// Ledger: decides when a push to one slice is applied, and when a pull of it is answered. Pure
// logic: the server reports what arrives, and carries out what Next returns.
//
// The version V of a slice is the number of updates applied to it. A worker's pushes are numbered
// from 1. A gradient is running from the pull whose values its worker computes it from (before the
// first pull, from the slice's initialisation) until it is applied; its base b is the V of that
// pull, and its age when it is applied is V - b.
//
//   sync   Step t is one update: the sum of the t-th push of every worker. It is applied when all
//          are there. A pull that follows push t is answered when V >= t.
//   async  A push is an update, applied when it arrives.
//   ssp    A push is an update. With n workers a running gradient has the deadline
//          b + staleness * n: it is applied while V is at most that. The earliest deadline goes
//          first; a push is held while its application would make another running gradient,
//          pushed or not, miss its deadline. The running gradient with the earliest deadline is
//          never held, so every held push waits for workers that are computing, and never for one
//          another.
//   sync:quorum=K  A gradient belongs to round V + 1 if it was computed from version V, the current
//          one. The round is applied as one update when every computing worker has pushed to it, or
//          when K have and the grace is over (EndGrace; the caller has the clock). A push that is
//          late, since its round was applied without it, joins the next round, but does not count
//          for its K; the pull that follows it is answered at once, with the values of the rounds
//          that it has missed, so its worker is in time again with its next push. After the minimum
//          quorum and grace window of "Decoupled DiLoCo", arXiv 2604.21428.
//
// Workers come and go. An added worker has no running gradient until its first pull is answered, so
// nobody waits for it; n grows by one for later deadlines, and earlier ones stay. When a worker
// leaves, its running gradient and its pulls are dropped, but its pushes count: until they are
// applied, it remains one of the n. When a worker is removed, its pushes are dropped, too.
//
// In async and ssp a pull that follows push t is answered when that push is applied. Staleness is
// bounded by versions, not by clocks as in Ho et al., "More Effective Distributed ML via a Stale
// Synchronous Parallel Parameter Server", NIPS 2013: there all workers end up at the speed of a
// permanently slower one.
#ifndef THINWIRE_SCHEDULE_STORE_LEDGER_H_
#define THINWIRE_SCHEDULE_STORE_LEDGER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/store/bytes.h"

namespace thinwire {

// All workers' numbers are below this, also those of workers that come later.
inline constexpr int kMaxStoreWorkers = 4096;

// When a push to the store is applied and when a pull is answered.
struct StoreMode {
  enum class Kind {
    kSync,    // a step is applied when every worker has pushed it
    kAsync,   // a push is applied when it arrives
    kSsp,     // as async, but no gradient older than staleness * workers updates is applied
    kQuorum,  // a round is applied when every worker has pushed to it, or when `quorum` have and
              // `grace` has passed since then; an update is the weighted mean of its pushes
  };

  Kind kind = Kind::kSync;
  int staleness = 0;                   // kSsp: at least 1
  int quorum = 0;                      // kQuorum: least number of pushes to a round, at least 1
  std::chrono::milliseconds grace{0};  // kQuorum: how long a round then waits for the others

  // Parses "sync", "async", "ssp:staleness=2" or "sync:quorum=2,grace=0.5", with the grace in
  // seconds. InvalidArgument says what was expected.
  static absl::StatusOr<StoreMode> Parse(std::string_view text);
  std::string ToString() const;

  // True if all workers take the same number of steps: an update has the pushes of those that have
  // taken the step.
  bool has_steps() const { return kind == Kind::kSync || kind == Kind::kQuorum; }
  // True if a lost worker does not stop the others.
  bool goes_on_without() const { return kind != Kind::kSync; }
  friend bool operator==(const StoreMode&, const StoreMode&) = default;
};

class Ledger {
 public:
  // One action for the server.
  struct Step {
    // Pushes to apply as one update, in rank order. Empty: answer the pull `request` of `worker`.
    struct Push {
      int worker = 0;
      uint64_t number = 0;
      friend bool operator==(const Push&, const Push&) = default;
    };
    std::vector<Push> pushes;
    // As given to OnPull.
    int worker = 0;
    uint64_t request = 0;
  };

  Ledger(StoreMode mode, int workers);

  // AlreadyExists for a push that arrived before: it is not counted again. Internal if its
  // predecessor is missing. FailedPrecondition, in ssp and with a quorum, for two pushes without a
  // pull between.
  absl::Status OnPush(int worker, uint64_t number);
  // A pull that follows the worker's push number `after` (0: none).
  void OnPull(int worker, uint64_t after, uint64_t request);
  // The worker waits in a call that all workers make, and pushes nothing before the call returns:
  // until then nobody waits for its running gradient, nor for one from a pull that is answered
  // meanwhile.
  void Pause(int worker);
  // Such a call returns to these workers. Their gradients run again, except those that can no
  // longer be applied in time with the running ones: their workers must pull before a push.
  void Resume(std::span<const int> workers);
  // The worker computes nothing until its next pull: it has no running gradient.
  void Idle(int worker);
  // A worker joins, under a new number or that of one that has gone. Its pushes count from 1. Not
  // in sync, where every step has the same workers.
  void Add(int worker);
  bool knows(int worker) const { return worker < std::ssize(workers_); }
  // The worker neither pushes nor pulls from now on.
  void Leave(int worker);
  // The worker is gone: its running gradient, pushes that are not applied, and pulls are dropped.
  void Remove(int worker);

  // True if the current round has its quorum: it then waits for the others only until EndGrace.
  bool HasQuorum() const;
  // The grace is over. No effect without a quorum, which may have been lost meanwhile.
  void EndGrace();

  // Writes the state for Restore; call when Next has nothing to do. Leaves out held pushes, waiting
  // pulls, and which workers are paused or leave: after Restore the caller must repeat those calls
  // (OnPush, OnPull, Pause, Leave).
  void Save(ByteWriter& to) const;
  // Reads that state into a new ledger of the same mode. False if the bytes are not a ledger's.
  bool Restore(ByteReader& from);

  struct Pull {
    int worker;
    uint64_t after, request;
  };
  const std::deque<Pull>& pulls() const { return pulls_; }  // not answered yet

  // Returns the next action; the server must have carried it out before the next call.
  std::optional<Step> Next();

  uint64_t version() const { return version_; }
  // Workers that are here or have a push to be applied: the deadlines' n.
  uint64_t workers() const;
  // The workers of which a push must arrive before a held push or a waiting pull can go on; empty
  // if none waits.
  std::vector<int> WaitsFor() const;

 private:
  struct Worker {
    bool here = true;
    uint64_t arrived = 0, applied = 0;  // numbers of its last push
    bool running = true;                // ssp: has pulled since its last push was applied;
                                        // quorum: takes part in rounds
    bool paused = false;                // waits in a call for the others
    bool leaves = false;                // goes when its pushes are applied
    uint64_t deadline = 0;              // ssp: of its running gradient; quorum: the version pulled
    uint64_t pulled = 0;                // quorum: number of the last push before its last pull
    uint64_t late = 0;                  // quorum: number of its last push that was late
  };

  // True if all deadlines (in any order) can be met from `version` on.
  static bool AreFeasible(uint64_t version, std::vector<uint64_t> deadlines);
  bool IsHeld(const Worker& worker) const { return worker.here && worker.arrived > worker.applied; }
  // Quorum. IsIn: its last push is of the current round. Computes: the round may still get one.
  bool IsIn(const Worker& worker) const { return IsHeld(worker) && worker.arrived > worker.late; }
  bool Computes(const Worker& worker) const {
    return worker.here && worker.running && !worker.paused && !worker.leaves && !IsIn(worker);
  }
  bool MayAnswer(const Pull& pull) const;
  std::optional<Step> NextRound();
  std::optional<Step> NextUpdate();
  bool MayApply(size_t worker) const;
  bool IsAwaited(const Worker& worker) const {
    return worker.here && (IsHeld(worker) || (worker.running && !worker.paused));
  }
  Step Apply(size_t worker);
  uint64_t Deadline() const;

  const StoreMode mode_;
  uint64_t version_ = 0;
  bool is_grace_over_ = false;
  std::vector<Worker> workers_;
  std::deque<Step::Push> arrivals_;  // async: not applied yet
  std::deque<Pull> pulls_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_LEDGER_H_
