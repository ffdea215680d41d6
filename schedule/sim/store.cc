#include "schedule/sim/store.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "schedule/sim/events.h"
#include "schedule/sim/jackson.h"
#include "schedule/sim/server.h"
#include "schedule/store/frames.h"
#include "schedule/store/layout.h"
#include "schedule/store/ledger.h"
#include "transport/messages/queues.h"

namespace thinwire::sim {
namespace {

using Kind = StoreHead::Kind;

// A message without its bytes.
struct Letter {
  int priority = 0;
  size_t bytes = 0;  // of head and body
  Kind kind = Kind::kPush;
  uint32_t slice = 0;
  uint64_t number = 0;  // of the push, or of the push before a pull
};
size_t CostOf(const Letter& letter) { return letter.bytes + kMessageCost; }

StoreLayout LayoutOf(const StoreSetting& s) {
  constexpr size_t kWhole = size_t{1} << 60;
  StoreLayout layout({.servers = s.servers,
                      .slice_elements = s.order == StoreOrder::kMxnet ? kWhole : s.slice_elements});
  std::vector<StoreKey> keys;
  for (const Unit& unit : s.profile.units) {
    keys.push_back({.name = std::to_string(keys.size()), .numel = unit.numel, .codec = s.codec});
  }
  layout.Add(keys).IgnoreError();  // can't fail: units have elements and distinct names
  return layout;
}

class StoreSimulation {
 public:
  explicit StoreSimulation(const StoreSetting& setting)
      : s_(setting),
        units_(setting.profile.units),
        layout_(LayoutOf(setting)),
        head_bytes_(StoreHead().ToBytes().size()),
        ledgers_(layout_.slices().size(), Ledger(setting.mode, setting.workers)) {
    const double server_rate = s_.server_bytes_per_s > 0 ? s_.server_bytes_per_s : s_.bytes_per_s;
    for (int m = 0; m < s_.workers + s_.servers; ++m) {
      machines_.emplace_back(m < s_.workers ? s_.bytes_per_s : server_rate);
    }
    for (int w = 0; w < s_.workers; ++w) {
      workers_.emplace_back(s_.seed * 1000003 + static_cast<uint64_t>(w));
      workers_.back().awaited.resize(units_.size());
    }
    const size_t pairs = static_cast<size_t>(s_.workers) * static_cast<size_t>(s_.servers);
    for (size_t i = 0; i < 2 * pairs; ++i) connections_.emplace_back(s_.credit);
  }

  StoreOutcome Run() {
    for (int w = 0; w < s_.workers; ++w) BeginStep(w);
    while (!outcome_.finished && ok_ && events_.Next()) {
    }
    return outcome_;
  }

 private:
  struct Machine {
    explicit Machine(double rate) : bytes_per_s(rate) {}
    double bytes_per_s;
    Server out, in;
  };
  // One direction of a connection.
  struct Connection {
    explicit Connection(size_t credit) : queue(credit) {}
    CreditQueueOf<Letter> queue;
    uint64_t taken = 0;
  };
  struct Worker {
    explicit Worker(uint64_t seed) : random(seed) {}
    std::mt19937_64 random;
    size_t step = 0;              // the current step, from 1
    double slowness = 1;          // of this step
    size_t unit = 0;              // that it computes, or waits for
    bool waiting = false;         // for that unit
    std::vector<size_t> awaited;  // number of slices, by unit
  };
  // The times of a step that its bound is computed from.
  struct Step {
    std::vector<std::vector<double>> ready;  // by worker and unit
    std::vector<double> slowness;            // by worker
    std::vector<double> backward_end;        // by worker
  };

  Machine& machine(int number) { return machines_[static_cast<size_t>(number)]; }
  Worker& worker(int number) { return workers_[static_cast<size_t>(number)]; }
  // Workers come before servers in the numbering; exactly one of the two is a worker.
  Connection& ConnectionOf(int from, int to) {
    const bool up = from < s_.workers;
    const int pair = (up ? from : to) * s_.servers + (up ? to : from) - s_.workers;
    return connections_[static_cast<size_t>(2 * pair + (up ? 0 : 1))];
  }
  int ServerOf(size_t slice) const { return s_.workers + layout_.slices()[slice].server; }
  size_t UpBytes(size_t slice) const {
    return head_bytes_ + EncodedBytes(s_.codec.up, layout_.slices()[slice].count);
  }
  size_t DownBytes(size_t slice) const {
    return head_bytes_ + EncodedBytes(s_.codec.down, layout_.slices()[slice].count);
  }
  Deadline Now() const {
    return Deadline(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(events_.now())));
  }

  // The links.

  void Send(int from, int to, const Letter& letter) {
    ConnectionOf(from, to).queue.Push(letter);
    LetGo(from, to);
  }

  void LetGo(int from, int to) {
    CreditQueueOf<Letter>& queue = ConnectionOf(from, to).queue;
    while (const std::optional<Letter> letter = queue.Pop(Now())) {
      const auto bytes = static_cast<double>(letter->bytes);
      Carry(from, to, bytes, [this, from, to, letter = *letter] { OnLetter(from, to, letter); });
    }
  }

  // Calls `then` when the last byte has arrived.
  void Carry(int from, int to, double bytes, Events::Action then) {
    const double sending_s = bytes / machine(from).bytes_per_s;
    const double sent = machine(from).out.Take(events_.now(), sending_s);
    events_.At(sent - sending_s + s_.latency_s, [=, this, then = std::move(then)] {
      const double taken = machine(to).in.Take(events_.now(), bytes / machine(to).bytes_per_s);
      events_.At(std::max(taken, sent + s_.latency_s), then);
    });
  }

  void OnLetter(int from, int to, const Letter& letter) {
    const uint64_t taken = ConnectionOf(from, to).taken += CostOf(letter);
    Carry(to, from, 0, [=, this] {
      ok_ = ok_ && ConnectionOf(from, to).queue.Acknowledge(taken, Now());
      LetGo(from, to);
    });
    if (letter.kind == Kind::kValues) {
      OnValues(to, letter);
    } else {
      OnRequest(from, letter);
    }
  }

  // The servers.

  void OnRequest(int from, const Letter& letter) {
    Ledger& ledger = ledgers_[letter.slice];
    if (letter.kind != Kind::kPull) ok_ = ok_ && ledger.OnPush(from, letter.number).ok();
    // A worker has one pull of a slice at a time, so its number serves as the request.
    if (letter.kind != Kind::kPush) {
      ledger.OnPull(from, letter.number, static_cast<uint64_t>(from));
    }
    while (const std::optional<Ledger::Step> step = ledger.Next()) {
      if (!step->pushes.empty()) continue;
      Send(ServerOf(letter.slice), step->worker,
           {.priority = PriorityOf(layout_.slices()[letter.slice].key),
            .bytes = DownBytes(letter.slice),
            .kind = Kind::kValues,
            .slice = letter.slice});
    }
  }

  // The workers.

  int PriorityOf(size_t unit) const {
    return s_.order == StoreOrder::kP3 ? -static_cast<int>(unit) : 0;
  }

  void Compute(int w, double seconds, Events::Action then) {
    events_.After(seconds * worker(w).slowness, std::move(then));
  }

  void BeginStep(int w) {
    Worker& its = worker(w);
    ++its.step;
    its.unit = units_.size();
    its.slowness = w == s_.workers - 1 ? s_.slow : 1.0;
    const double draw = static_cast<double>(its.random() >> 11) * 0x1p-53;
    if (draw < s_.spike_chance) its.slowness *= s_.spike;
    if (s_.mode.kind == StoreMode::Kind::kSync) {
      if (steps_.size() < its.step) {
        const auto n = static_cast<size_t>(s_.workers);
        steps_.push_back({.ready = std::vector(n, std::vector<double>(units_.size())),
                          .slowness = std::vector<double>(n),
                          .backward_end = std::vector<double>(n)});
      }
      steps_[its.step - 1].slowness[static_cast<size_t>(w)] = its.slowness;
    }
    NextBackward(w);
  }

  void NextBackward(int w) {
    Worker& its = worker(w);
    if (its.unit == 0) {
      if (!steps_.empty())
        steps_[its.step - 1].backward_end[static_cast<size_t>(w)] = events_.now();
      return Compute(w, s_.profile.between_s, [this, w] { NextForward(w); });
    }
    --its.unit;
    Compute(w, units_[its.unit].backward_s, [this, w] {
      Exchange(w);
      NextBackward(w);
    });
  }

  void Exchange(int w) {
    Worker& its = worker(w);
    const size_t unit = its.unit;
    if (!steps_.empty()) steps_[its.step - 1].ready[static_cast<size_t>(w)][unit] = events_.now();
    const Range slices = layout_.SlicesOf(unit);
    its.awaited[unit] = slices.end - slices.begin;
    const bool apart = s_.order == StoreOrder::kMxnet;
    for (size_t i = slices.begin; i < slices.end; ++i) {
      Letter letter{.priority = PriorityOf(unit),
                    .bytes = UpBytes(i),
                    .kind = apart ? Kind::kPush : Kind::kPushPull,
                    .slice = static_cast<uint32_t>(i),
                    .number = its.step};
      Send(w, ServerOf(i), letter);
      if (!apart) continue;
      letter.bytes = head_bytes_;
      letter.kind = Kind::kPull;
      Send(w, ServerOf(i), letter);
    }
  }

  void OnValues(int w, const Letter& letter) {
    Worker& its = worker(w);
    const size_t unit = layout_.slices()[letter.slice].key;
    --its.awaited[unit];
    if (its.waiting && its.unit == unit) NextForward(w);
  }

  void NextForward(int w) {
    Worker& its = worker(w);
    if (its.unit == units_.size()) return EndStep(w);
    its.waiting = its.awaited[its.unit] > 0;
    if (its.waiting) return;
    Compute(w, units_[its.unit].forward_s, [this, w] {
      ++worker(w).unit;
      NextForward(w);
    });
  }

  // In sync the last worker ends its step before any worker ends the next one.
  void EndStep(int w) {
    const int workers = s_.workers;
    ++ended_;
    if (ended_ % workers == 0) {
      const int step = ended_ / workers;
      if (step > s_.warmup) {
        if (!steps_.empty()) bounds_s_ += BoundOf(steps_[worker(w).step - 1]) - last_end_;
        if (step == s_.steps) {
          const double counted = s_.steps - s_.warmup;
          outcome_ = {.finished = true,
                      .step_s = (events_.now() - begin_) / counted,
                      .bound_s = bounds_s_ / counted};
        }
      }
      last_end_ = events_.now();
      if (step == s_.warmup) begin_ = last_end_;
    }
    BeginStep(w);
  }

  // The bound.

  // The earliest time at which the step could have ended, given what the workers computed. Every
  // link carries its bytes, in any order. After the last byte of a unit that a worker sends, that
  // byte's slice must still come back; no byte of a unit comes back before a slice of every worker
  // has arrived.
  double BoundOf(const Step& step) const {
    const auto workers = static_cast<size_t>(s_.workers);
    const size_t units = units_.size();
    std::vector<std::vector<double>> tails(workers, std::vector<double>(units));
    std::vector<double> tail(units);  // the longest of all workers
    std::vector<double> first(units, std::numeric_limits<double>::max()), last(units);  // ready
    double best = 0;
    for (size_t w = 0; w < workers; ++w) {
      double seconds = 0;
      for (size_t u = units; u-- > 0;) {
        seconds += units_[u].forward_s * step.slowness[w];
        tails[w][u] = seconds;
        tail[u] = std::max(tail[u], seconds);
        first[u] = std::min(first[u], step.ready[w][u]);
        last[u] = std::max(last[u], step.ready[w][u]);
      }
      best =
          std::max(best, step.backward_end[w] + s_.profile.between_s * step.slowness[w] + seconds);
    }
    const double rate = s_.bytes_per_s;
    std::vector<std::vector<Job>> up(workers), down(workers);
    std::vector<std::vector<Job>> in(static_cast<size_t>(s_.servers)), out(in.size());
    for (size_t u = 0; u < units; ++u) {
      const Range slices = layout_.SlicesOf(u);
      double up_bytes = 0, down_bytes = 0;
      double least_up = std::numeric_limits<double>::max(), least_down = least_up;
      std::vector<double> server_up(in.size()), server_down(in.size());
      for (size_t i = slices.begin; i < slices.end; ++i) {
        const auto server = static_cast<size_t>(layout_.slices()[i].server);
        const auto bytes_up = static_cast<double>(UpBytes(i));
        const auto bytes_down = static_cast<double>(DownBytes(i));
        up_bytes += bytes_up;
        down_bytes += bytes_down;
        server_up[server] += bytes_up;
        server_down[server] += bytes_down;
        least_up = std::min(least_up, bytes_up);
        least_down = std::min(least_down, bytes_down);
      }
      const double there_s = least_up / rate + s_.latency_s;
      const double back_s = least_down / rate + s_.latency_s;
      for (size_t w = 0; w < workers; ++w) {
        up[w].push_back({step.ready[w][u], up_bytes / rate, s_.latency_s + back_s + tail[u]});
        down[w].push_back({last[u] + there_s + s_.latency_s, down_bytes / rate, tails[w][u]});
      }
      for (size_t s = 0; s < in.size(); ++s) {
        if (server_up[s] == 0) continue;
        const double n = s_.workers;
        const double server_rate = machines_.back().bytes_per_s;
        in[s].push_back(
            {first[u] + s_.latency_s, n * server_up[s] / server_rate, back_s + tail[u]});
        for (size_t w = 0; w < workers; ++w) {
          out[s].push_back(
              {last[u] + there_s, server_down[s] / server_rate, s_.latency_s + tails[w][u]});
        }
      }
    }
    for (const auto* const links : {&up, &down, &in, &out}) {
      for (const std::vector<Job>& jobs : *links) best = std::max(best, JacksonBound(jobs));
    }
    return best;
  }

  const StoreSetting& s_;
  const std::vector<Unit>& units_;
  const StoreLayout layout_;
  const size_t head_bytes_;
  Events events_;
  std::vector<Ledger> ledgers_;    // by slice
  std::vector<Machine> machines_;  // workers, then servers
  std::vector<Worker> workers_;
  std::vector<Connection> connections_;  // of each worker with each server: up, down
  std::deque<Step> steps_;               // in sync
  bool ok_ = true;                       // the store's classes have refused nothing
  int ended_ = 0;                        // steps of all workers
  double begin_ = 0, last_end_ = 0, bounds_s_ = 0;
  StoreOutcome outcome_;
};

}  // namespace

StoreOutcome SimulateStore(const StoreSetting& setting) { return StoreSimulation(setting).Run(); }

}  // namespace thinwire::sim
