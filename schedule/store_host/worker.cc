#include "schedule/store_host/worker.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/hash.h"
#include "schedule/store/optimizer.h"
#include "schedule/store/server.h"
#include "schedule/store_host/serve.h"
#include "transport/store.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

constexpr std::chrono::milliseconds kFailedClose{100};
constexpr std::chrono::milliseconds kLook{2};

std::vector<uint8_t> AsFp32(const Backend& backend, const TensorView& values) {
  const CodecSpec fp32 = LosslessSpec(DType::kF32);
  std::vector<uint8_t> bytes(EncodedBytes(fp32, values.numel));
  backend.Encode(fp32, values, nullptr, bytes.data());
  bytes.resize(values.numel * sizeof(float));  // without padding
  return bytes;
}

std::vector<uint8_t> BytesOf(std::string_view text) { return {text.begin(), text.end()}; }

absl::Status CheckCodec(const CodecPair& codec) {
  if (codec.momentum() != MomentumNeed::kRequired) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "codec ", codec.ToString(), " compresses a momentum, which a store's workers do ",
      "not keep; take int4, int8, adaptive or topk"));
}

absl::Status CheckMode(const StoreWorker::Options& options) {
  const StoreMode& mode = options.mode;
  if (mode.kind != StoreMode::Kind::kQuorum) return absl::OkStatus();
  if (mode.quorum > options.workers) {
    return absl::InvalidArgumentError(absl::StrCat("mode ", mode.ToString(), " has ",
                                                   options.workers, " workers, expected at least ",
                                                   mode.quorum, "; take a smaller quorum"));
  }
  if (mode.grace >= options.timeout) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mode ", mode.ToString(), " has a grace that is not below the timeout of ",
        std::chrono::duration<double>(options.timeout).count(), " s; take a longer timeout"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreWorker>> StoreWorker::Create(
    std::unique_ptr<MessagePlane> plane, const Options& options) {
  if (absl::Status bad = CheckCodec(options.codec); !bad.ok()) return bad;
  if (absl::Status bad = CheckMode(options); !bad.ok()) return bad;
  std::unique_ptr<StoreWorker> worker(new StoreWorker(std::move(plane), options));
  if (absl::Status bad = worker->Connect(); !bad.ok()) return bad;
  if (absl::Status bad = worker->Enter(); !bad.ok()) return bad;
  return worker;
}

StoreWorker::StoreWorker(std::unique_ptr<MessagePlane> plane, const Options& options)
    : plane_(std::move(plane)),
      rank_(WorkerOfRank(options.workers, options.layout.servers, plane_->rank())),
      options_(options),
      backend_(CpuBackend()),
      layout_(options.layout) {
  for (int server = 0; server < options.layout.servers; ++server) {
    resenders_.push_back(
        std::make_unique<Resender>(*plane_, RankOfServer(options.workers, server)));
  }
  receiver_ = std::thread([this] { Receive(); });
}

StoreWorker::~StoreWorker() { Close().IgnoreError(); }

absl::Status StoreWorker::Close() {
  if (is_closed_) return absl::OkStatus();
  is_closed_ = true;
  // A server with a journal that is away receives the remaining messages and kLeave when it is
  // back. Without kLeave it would wait for this worker.
  if (AwaitAnswers().ok()) {
    {
      const absl::MutexLock lock(&mu_);
      is_leaving_ = true;
    }
    for (size_t server = 0; server < resenders_.size(); ++server) {
      if (!resenders_[server]->has_journal()) continue;
      SendTo(server, kLast, {.kind = Kind::kLeave, .slice = StoreHead::kNoSlice}, {}).IgnoreError();
    }
    AwaitAnswers().IgnoreError();
  }
  absl::Status failure;
  {
    const absl::MutexLock lock(&mu_);
    is_closing_ = true;
    failure = failure_;
  }
  // After a failure, unsent messages are not worth waiting for.
  const absl::Status closed =
      plane_->Close(Clock::now() + (failure.ok() ? options_.timeout : kFailedClose));
  receiver_.join();
  return failure.ok() ? closed : failure;
}

absl::Status StoreWorker::AwaitAnswers() {
  return Await(
      [&] {
        mu_.AssertHeld();
        return std::ranges::all_of(resenders_,
                                   [](const auto& resender) { return resender->is_empty(); });
      },
      [] { return std::string("a server has not answered everything"); });
}

absl::Status StoreWorker::Connect() {
  return Await(
      [&] {
        mu_.AssertHeld();
        return connected_.size() == resenders_.size();
      },
      [&] {
        mu_.AssertHeld();
        std::vector<int> missing;
        for (int server = 0; server < options_.layout.servers; ++server) {
          if (!connected_.contains(server)) missing.push_back(server);
        }
        return absl::StrCat("server ", absl::StrJoin(missing, ", "), " did not come");
      });
}

absl::Status StoreWorker::Enter() {
  for (size_t server = 0; server < resenders_.size(); ++server) {
    SendTo(server, kLast, {.kind = Kind::kEnter}, {}).IgnoreError();  // Await returns it
  }
  const absl::Status waited = Await(
      [&] {
        mu_.AssertHeld();
        return welcomes_.size() == resenders_.size();
      },
      [] { return std::string("a server has not answered the first message"); });
  if (!waited.ok()) return waited;
  std::vector<std::array<uint64_t, kTogetherKinds>> before;  // by server
  {
    const absl::MutexLock lock(&mu_);
    for (const auto& [server, welcome] : welcomes_) {
      ByteReader in(welcome.body);
      for (uint64_t& number : before.emplace_back()) number = in.Number();
      has_joined_ = has_joined_ || StoreHead::Parse(welcome.head)->number != 0;
    }
  }
  for (size_t what = 0; what < kTogetherKinds; ++what) {
    for (const auto& calls : before)
      calls_before_[what] = std::max(calls_before_[what], calls[what]);
    // Some servers got kEnter before a call of the others, and some after it. Tell the former to
    // complete the call without this worker.
    for (size_t server = 0; server < before.size(); ++server) {
      if (before[server][what] == calls_before_[what]) continue;
      const absl::Status bad = SendTo(server, kLast,
                                      {.kind = Kind::kTogether,
                                       .slice = static_cast<uint32_t>(what),
                                       .number = calls_before_[what],
                                       .have = 1},
                                      {});
      if (!bad.ok()) return bad;
    }
  }
  return absl::OkStatus();
}

bool StoreWorker::CatchesUp(Together what) {
  const absl::MutexLock lock(&mu_);
  return !has_pushed_ && calls_made_[what] < calls_before_[static_cast<size_t>(what)];
}

void StoreWorker::Fail(absl::Status reason) {
  const absl::MutexLock lock(&mu_);
  if (failure_.ok()) failure_ = std::move(reason);
  changed_.SignalAll();
}

absl::Status StoreWorker::SetCodec(const CodecPair& codec) {
  if (absl::Status bad = CheckCodec(codec); !bad.ok()) return bad;
  options_.codec = codec;
  return absl::OkStatus();
}

absl::Status StoreWorker::Init(std::span<const Value> values) {
  std::vector<StoreKey> keys;
  for (const Value& value : values) {
    if (value.key.find('\n') != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat("key '", value.key, "' has a line break"));
    }
    keys.push_back({value.key, value.values.numel, value.width, options_.codec});
  }
  const size_t first_slice = layout_.slices().size(), first_key = layout_.keys().size();
  {
    const absl::MutexLock lock(&mu_);  // the receiver may be handling pulls of other keys
    if (absl::Status bad = layout_.Add(keys); !bad.ok()) return bad;
    for (size_t i = first_slice; i < layout_.slices().size(); ++i) {
      const StoreSlice& slice = layout_.slices()[i];
      const CodecSpec& down = layout_.keys()[slice.key].codec.down;
      readers_.push_back(std::make_unique<DeltaReader>(down, slice.count, backend_));
    }
  }

  std::vector<StoreTable> tables(static_cast<size_t>(options_.layout.servers));
  for (StoreTable& table : tables) {
    table = {options_.mode, options_.codec, layout_.hash(), {}};
  }
  for (size_t i = first_slice; i < layout_.slices().size(); ++i) {
    const StoreSlice& slice = layout_.slices()[i];
    const StoreKey& key = layout_.keys()[slice.key];
    tables[static_cast<size_t>(slice.server)].slices.push_back(
        {static_cast<uint32_t>(i), slice.offset, slice.count, key.width, key.name});
    if (rank_ != 0 || CatchesUp(Together::kInit)) continue;
    const TensorView part = values[slice.key - first_key].values.Slice(slice.offset, slice.count);
    const absl::Status bad =
        SendTo(ServerOf(i), kLast, {.kind = Kind::kPut, .slice = static_cast<uint32_t>(i)},
               AsFp32(backend_, part));
    if (!bad.ok()) return bad;
  }
  std::vector<std::string> bodies;
  for (const StoreTable& table : tables) bodies.push_back(table.ToString());

  std::vector<std::shared_ptr<float[]>> residuals;
  for (const StoreKey& key : keys) {
    residuals.emplace_back();
    if (!key.has_residual()) continue;
    BucketLayout whole;
    whole.segments.push_back({key.name, 0, key.numel, key.numel});
    const absl::StatusOr<std::shared_ptr<const BucketMemory>> memory =
        feedback_.Bind(key.name, whole);
    if (!memory.ok()) return memory.status();
    residuals.back() = {*memory, (*memory)->residual.get()};
  }
  {
    const absl::MutexLock lock(&mu_);
    for (auto& residual : residuals) {
      keys_.emplace_back();
      keys_.back().residual = std::move(residual);
    }
  }
  return CallAll(Together::kInit, bodies);
}

absl::Status StoreWorker::SendTo(size_t server, int priority, const StoreHead& head,
                                 std::vector<uint8_t> body) {
  {
    const absl::MutexLock lock(&mu_);
    queued_ += sizeof(head) + body.size();
  }
  const absl::Status sent = resenders_[server]->Send(priority, head, std::move(body));
  // If the receiver has set failure_, return that: it says why the server was lost.
  const absl::MutexLock lock(&mu_);
  if (!sent.ok() && failure_.ok()) {
    failure_ = absl::Status(
        sent.code(), absl::StrCat("worker ", rank_, ", server ", server, ": ", sent.message()));
    changed_.SignalAll();
  }
  return sent.ok() ? sent : failure_;
}

absl::Status StoreWorker::AwaitRoom() {
  const Deadline deadline = Clock::now() + options_.timeout + kGrace;
  while (true) {
    const uint64_t left = plane_->bytes_sent();
    {
      const absl::MutexLock lock(&mu_);
      if (!failure_.ok()) return failure_;
      if (queued_ <= left + options_.max_queued) return absl::OkStatus();
      // The plane does not notify anyone when bytes leave, so poll.
      changed_.WaitUntil(&mu_, Clock::now() + kLook);
    }
    if (Clock::now() < deadline) continue;
    Fail(absl::DeadlineExceededError(absl::StrCat(
        "worker ", rank_, ": more than ", options_.max_queued, " bytes of pushes did not leave ",
        "within ", std::chrono::duration<double>(options_.timeout + kGrace).count(), " s")));
  }
}

absl::Status StoreWorker::Push(std::string_view key, TensorView gradient, int priority,
                               double weight) {
  return Start(key, &gradient, nullptr, priority, weight);
}

absl::Status StoreWorker::Pull(std::string_view key, TensorView out, int priority) {
  return Start(key, nullptr, &out, priority);
}

absl::Status StoreWorker::PushPull(std::string_view key, TensorView gradient, TensorView out,
                                   int priority, double weight) {
  return Start(key, &gradient, &out, priority, weight);
}

absl::Status StoreWorker::FindKey(std::string_view name, size_t* index) const {
  const absl::Status found = layout_.Find(name, index);
  if (found.ok()) return found;
  return absl::InvalidArgumentError(absl::StrCat("worker ", rank_, ": ", found.message()));
}

absl::StatusOr<StoreWorker::Use> StoreWorker::Begin(size_t index, bool pushes,
                                                    const PulledOf* pulled) {
  if (absl::Status bad = Wait(layout_.keys()[index].name); !bad.ok()) return bad;
  if (absl::Status bad = pushes ? AwaitOthers(index) : absl::OkStatus(); !bad.ok()) return bad;
  if (absl::Status bad = AwaitRoom(); !bad.ok()) return bad;
  const Range slices = layout_.SlicesOf(index);
  const absl::MutexLock lock(&mu_);
  Key& key = keys_[index];
  has_pushed_ = has_pushed_ || pushes;
  if (pushes) ++key.pushes;
  const Use use = {key.pushes, last_request_ + 1, key.residual.get()};
  if (pulled != nullptr) {
    key.asked = key.pushes;
    key.pulls = slices.end - slices.begin;
    for (size_t i = slices.begin; i < slices.end; ++i) pulled_[++last_request_] = (*pulled)(i);
  }
  return use;
}

absl::Status StoreWorker::AwaitOthers(size_t index) {
  const Range slices = layout_.SlicesOf(index);
  StoreHead head{.kind = Kind::kPull, .have = StoreHead::kNoValues};
  {
    const absl::MutexLock lock(&mu_);
    Key& key = keys_[index];
    key.applied = std::max(key.applied, key.asked);  // the last pull has been answered
    if (options_.mode.kind != StoreMode::Kind::kSync || key.pushes - key.applied < kMostAhead) {
      return absl::OkStatus();
    }
    head.number = key.pushes + 1 - kMostAhead;
    head.request = last_request_ + 1;
    key.applied = key.pushes;
    key.pulls = slices.end - slices.begin;
    for (size_t i = slices.begin; i < slices.end; ++i) pulled_[++last_request_] = {index, i, {}};
  }
  const bool is_sparse = layout_.keys()[index].width > 0;
  for (size_t i = slices.begin; i < slices.end; ++i, ++head.request) {
    head.slice = static_cast<uint32_t>(i);
    const absl::Status bad = SendTo(ServerOf(i), std::numeric_limits<int>::max(), head,
                                    is_sparse ? RowsBody({}, 0) : std::vector<uint8_t>());
    if (!bad.ok()) return bad;
  }
  return Wait(layout_.keys()[index].name);
}

uint64_t StoreWorker::DrawsKey(const CodecSpec& spec, std::string_view key) const {
  return HashCombine(HashCombine(spec.seed, HashBytes(key)), static_cast<uint64_t>(rank_));
}

absl::Status StoreWorker::CheckWeightOf(std::string_view key, double weight) const {
  absl::Status bad = CheckWeight(weight);
  if (bad.ok() && weight != 1.0 && options_.mode.kind != StoreMode::Kind::kQuorum) {
    bad = absl::InvalidArgumentError(absl::StrCat("its weight is ", weight, ", expected 1 in mode ",
                                                  options_.mode.ToString(),
                                                  "; weights are for mode sync:quorum=k,grace=s"));
  }
  if (bad.ok()) return bad;
  return absl::InvalidArgumentError(
      absl::StrCat("worker ", rank_, ": key '", std::string(key), "', a push: ", bad.message()));
}

absl::Status StoreWorker::Start(std::string_view name, TensorView* gradient, TensorView* out,
                                int priority, double weight) {
  size_t index = 0;
  if (absl::Status bad = FindKey(name, &index); !bad.ok()) return bad;
  if (absl::Status bad = CheckWeightOf(name, weight); !bad.ok()) return bad;
  if (layout_.keys()[index].width > 0) {
    return absl::InvalidArgumentError(absl::StrCat("worker ", rank_, ": key '", std::string(name),
                                                   "' is row-sparse; push rows of it, and pull ",
                                                   "the rows that are needed"));
  }
  for (const TensorView* const tensor : {gradient, out}) {
    if (tensor == nullptr || tensor->numel == layout_.keys()[index].numel) continue;
    return absl::InvalidArgumentError(absl::StrCat("worker ", rank_, ": key '", std::string(name),
                                                   "' has ", layout_.keys()[index].numel,
                                                   " elements, got a tensor of ", tensor->numel));
  }
  const auto part_of_out = [&](size_t i) {
    const StoreSlice& slice = layout_.slices()[i];
    return Pulled{index, i, out->Slice(slice.offset, slice.count)};
  };
  const PulledOf pulled = part_of_out;
  const absl::StatusOr<Use> use =
      Begin(index, gradient != nullptr, out == nullptr ? nullptr : &pulled);
  if (!use.ok()) return use.status();
  const Range slices = layout_.SlicesOf(index);
  const uint64_t number = use->number;
  const CodecSpec spec = layout_.keys()[index].codec.up.AtStep(number == 0 ? 0 : number - 1);
  const uint64_t draws_key = DrawsKey(spec, name);
  for (size_t i = slices.begin; i < slices.end; ++i) {
    const StoreSlice& slice = layout_.slices()[i];
    StoreHead head{.kind = gradient == nullptr ? Kind::kPull
                           : out == nullptr    ? Kind::kPush
                                               : Kind::kPushPull,
                   .slice = static_cast<uint32_t>(i),
                   .number = number};
    if (out != nullptr) {
      head.have = readers_[i]->have();
      head.request = use->request + (i - slices.begin);
    }
    std::vector<uint8_t> body;
    if (gradient != nullptr) {
      body.resize(EncodedBytes(spec, slice.count));
      const Draws draws = {.key = draws_key, .stream = number, .first = slice.offset};
      backend_.Encode(spec, gradient->Slice(slice.offset, slice.count),
                      use->residual == nullptr ? nullptr : use->residual + slice.offset,
                      body.data(), draws);
      if (options_.mode.kind == StoreMode::Kind::kQuorum) AppendWeight(weight, &body);
    }
    const absl::Status bad = SendTo(ServerOf(i), priority, head, std::move(body));
    if (!bad.ok()) return bad;
  }
  return absl::OkStatus();
}

absl::Status StoreWorker::Wait(std::string_view name) {
  size_t index = 0;
  if (absl::Status bad = FindKey(name, &index); !bad.ok()) return bad;
  const absl::Status waited = Await(
      [&] {
        mu_.AssertHeld();
        return keys_[index].pulls == 0;
      },
      [&] {
        mu_.AssertHeld();
        return AwaitedPulls();
      });
  const absl::MutexLock lock(&mu_);
  while (keys_[index].is_written) changed_.Wait(&mu_);
  return waited;
}

absl::Status StoreWorker::WaitAll() {
  const absl::Status waited = Await(
      [&] {
        mu_.AssertHeld();
        return pulled_.empty();
      },
      [&] {
        mu_.AssertHeld();
        return AwaitedPulls();
      });
  const absl::MutexLock lock(&mu_);
  const auto written = [this] {
    mu_.AssertHeld();
    return std::any_of(keys_.begin(), keys_.end(), [](const Key& key) { return key.is_written; });
  };
  while (written()) changed_.Wait(&mu_);
  return waited;
}

std::string StoreWorker::AwaitedPulls() const {
  if (pulled_.empty()) return "no pull waits";
  const Pulled& first = pulled_.begin()->second;
  return absl::StrCat(pulled_.size(), " slices were not pulled, the first of key '",
                      layout_.keys()[first.key].name, "' at server ",
                      layout_.slices()[first.slice].server);
}

absl::Status StoreWorker::CallAll(Together what) {
  return CallAll(what, std::vector<std::string>(static_cast<size_t>(options_.layout.servers)));
}

absl::Status StoreWorker::CallAll(Together what, const std::vector<std::string>& bodies) {
  const bool catches_up = CatchesUp(what);
  uint64_t& made = calls_made_[what];
  if (!catches_up) made = std::max(made, calls_before_[static_cast<size_t>(what)]);
  const uint64_t number = ++made;
  if (catches_up && what == Together::kBarrier) return absl::OkStatus();
  const auto kind = static_cast<uint32_t>(what);
  for (size_t server = 0; server < bodies.size(); ++server) {
    const StoreHead head{.kind = Kind::kTogether, .slice = kind, .number = number};
    SendTo(server, kLast, head, BytesOf(bodies[server])).IgnoreError();  // Await returns it
  }
  const absl::Status waited = Await(
      [&] {
        mu_.AssertHeld();
        return done_[{kind, number}].size() == bodies.size();
      },
      [&] { return std::string("a call that every worker makes was not completed"); });
  const absl::MutexLock lock(&mu_);
  // If the call completed, a failure since then goes to the next call.
  const bool done = done_[{kind, number}].size() == bodies.size();
  done_.erase({kind, number});
  if (!done) return waited;
  const std::string refusal = std::exchange(refusal_, "");
  if (refusal.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("worker ", rank_, ": ", refusal));
}

absl::StatusOr<StoreWorker::Work> StoreWorker::Take(uint32_t share, const WorkPlan& plan,
                                                    uint64_t applied) {
  // With a quorum, a pull may also be answered before the push that it follows is applied.
  if (options_.mode.has_steps() && options_.workers > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", rank_, ": work is not shared in mode ", options_.mode.ToString(),
        ", in which all workers take as many steps; cut the data into equal parts, or take mode ",
        "async or ssp"));
  }
  StoreHead head{.kind = Kind::kTake, .slice = share, .number = taken_[share] + 1, .have = applied};
  {
    const absl::MutexLock lock(&mu_);
    head.request = work_request_ = ++last_request_;
    work_.reset();
  }
  constexpr int kFirst = std::numeric_limits<int>::max();
  const auto ask = [&]() -> absl::StatusOr<std::pair<StoreHead, std::string>> {
    const absl::Status sent = SendTo(0, kFirst, head, BytesOf(plan.ToString()));
    if (!sent.ok()) return sent;
    const absl::Status waited = Await(
        [&] {
          mu_.AssertHeld();
          return work_.has_value();
        },
        [] { return std::string("other workers have not finished what they took of the work"); });
    if (!waited.ok()) return waited;
    const absl::MutexLock lock(&mu_);
    return *std::exchange(work_, std::nullopt);
  };
  auto answer = ask();
  if (!answer.ok()) return answer.status();
  const bool waits = answer->second == kWaitForWork;
  if (waits) {
    if (absl::Status bad = WaitAll(); !bad.ok()) return bad;
    const StoreHead idle{.kind = Kind::kIdle, .slice = StoreHead::kNoSlice, .number = head.request};
    for (size_t server = 0; server < resenders_.size(); ++server) {
      if (absl::Status bad = SendTo(server, kFirst, idle, {}); !bad.ok()) return bad;
    }
    head.have = taken_[share];  // all its ranges are applied by now
    answer = ask();
    if (!answer.ok()) return answer.status();
  }
  const auto& [work, text] = *answer;
  if (!text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("worker ", rank_, ": ", text));
  }
  if (work.slice > 0) ++taken_[share];
  return Work{{.epoch = work.number, .first = work.have, .count = work.slice}, waits};
}

absl::Status StoreWorker::SetOptimizer(std::string_view text) {
  const absl::StatusOr<OptimizerSpec> spec = OptimizerSpec::Parse(text);
  if (!spec.ok()) return spec.status();
  return CallAll(
      Together::kOptimizer,
      std::vector<std::string>(static_cast<size_t>(options_.layout.servers), std::string(text)));
}

absl::Status StoreWorker::Barrier() { return CallAll(Together::kBarrier); }

std::string StoreWorker::Describe() const {
  const absl::MutexLock lock(&mu_);
  std::string text = absl::StrCat(
      "store: worker ", rank_, " of ", options_.workers, ", ", options_.layout.servers,
      " servers, mode ", options_.mode.ToString(), "; new keys have codec ",
      options_.codec.ToString(), "\n", layout_.keys().size(), " keys in ", layout_.slices().size(),
      " slices; elements by server: ", absl::StrJoin(layout_.loads(), " "), "\n",
      plane_->bytes_sent(), " bytes sent; ", AwaitedPulls(), "\n");
  if (!failure_.ok()) absl::StrAppend(&text, "failed: ", failure_.message(), "\n");
  return text;
}

}  // namespace thinwire
