#include "schedule/order/sequencer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thinwire {
namespace {

constexpr double kLate_s = 0.1;   // age at which a direct tensor is reported after all
constexpr double kGrace_s = 1.5;  // for rank 0 to name the reason, if it answers

// Parts of the timeout. A rank that waits for a tensor pings a few times in the last quarter, so it
// knows at the deadline which ranks are silent.
constexpr double kAhead = 0.25;
constexpr double kPause = kAhead / 4;

double Seconds(std::chrono::nanoseconds duration) { return 1e-9 * duration.count(); }

}  // namespace

absl::StatusOr<bool> ControlTree::SumUp(int rank, const Report& report) {
  Reported* tensor = reported_.Find(report.id());
  if (tensor == nullptr) {
    tensor = &reported_.Insert(report.id());
    *tensor = {report, rank, 0};
  }
  absl::Status differs = CheckAgreement(tensor->first_rank, tensor->first, rank, report);
  if (!differs.ok()) return differs;
  const bool all = ++tensor->reports == std::min(group_, members_.size - head());
  if (all) reported_.Erase(report.id());
  return all;
}

Sequencer::Sequencer(const Membership& members, const Options& options, Matching matching,
                     std::vector<double> hop_shares, TensorBook* shared)
    : members_(members),
      matching_(matching),
      predicts_(options.predict == Predict::kAlways),
      leader_(members.rank == 0 ? std::make_unique<Leader>(members.size, options.policy,
                                                           options.chunk_bytes * options.lanes)
                                : nullptr),
      prediction_(members.rank == 0 ? std::make_unique<Prediction>(options, hop_shares) : nullptr),
      alone_(shared == nullptr ? std::make_unique<TensorBook>(members.rank, 1) : nullptr),
      book_(shared == nullptr ? *alone_ : *shared),
      starts_(members.rank, options, matching, std::move(hop_shares), book_, outbox_),
      tree_(members, options.control_tree_from),
      roll_(members.rank == 0 ? members.size : 1, kPause * Seconds(options.timeout),
            AnswerPatience(Seconds(options.timeout))),
      options_(options) {
  // With kByOrder nothing is withdrawn, so the order must never contradict a program that waits.
  // With kByTag an order that ignores waits is better: chunks that are not urgent may fill the
  // whole window if they overtake nothing.
  if (leader_ != nullptr && matching_ == Matching::kByOrder) prediction_->ExpectWaits();
}

void Sequencer::Begin(double now) {
  for (int peer = 1; leader_ != nullptr && peer < members_.size; ++peer) {
    roll_.AskNow(peer, now);
    outbox_.Send(peer, FrameType::kPing);
  }
}

void Sequencer::OnPong(int peer, double now) {
  if (roll_.OnAnswer(peer, now)) {
    roll_.AskNow(peer, now);
    outbox_.Send(peer, FrameType::kPing);
    return;
  }
  if (!roll_.measured() || options_.predict != Predict::kWhenFar) return;
  predicts_ = roll_.latency_s() > Seconds(options_.far);
}

void Sequencer::OnSubmit(std::shared_ptr<const Report> submitted, double now,
                         std::shared_ptr<void> host) {
  const Report& report = *submitted;
  const bool reported = report.direct == 0;
  book_.Insert(members_.rank, report.id(),
               {.report = std::move(submitted),
                .reported = reported,
                .host = std::move(host),
                .submitted = now});
  if (leader_ != nullptr) leader_->OnSubmitted(report);
  if (reported) SendReport(FrameType::kReport, report, now);
  starts_.Start(now);
}

void Sequencer::SendReport(FrameType type, const Report& report, double now) {
  if (leader_ != nullptr) return OnReport(0, type, report, now);
  // Rank 0 judges late and overdue tensors, so each rank reports them to it directly.
  const bool in_order = type == FrameType::kReport && report.direct == 0;
  if (in_order && tree_.is_head()) return OnGroupReport(members_.rank, report);
  outbox_.Send(in_order ? tree_.head() : 0, type).report = report;
}

void Sequencer::OnGroupReport(int rank, const Report& report) {
  const absl::StatusOr<bool> all = tree_.SumUp(rank, report);
  if (!all.ok()) return Fail(all.status());
  if (*all) outbox_.Send(0, FrameType::kGroupReport).report = report;
}

// Rank 0 calls the roll when a tensor is late. It must then know what each rank has, even for
// tensors that not all of the rank's group have.
void Sequencer::ReportAnew() {
  if (tree_.HeadOf(members_.rank) == 0) return;
  book_.ForEach(members_.rank, [this](const OwnTensor& own) {
    if (own.report->direct == 0) outbox_.Send(0, FrameType::kReport).report = *own.report;
  });
}

void Sequencer::OnMessage(int from, const OrderMessage& message, double now) {
  switch (message.type) {
    case FrameType::kReport:
      if (leader_ == nullptr) {
        if (tree_.HeadOf(from) == members_.rank) OnGroupReport(from, message.report);
        break;
      }
      [[fallthrough]];
    case FrameType::kOverdue:
      if (leader_ != nullptr) OnReport(from, message.type, message.report, now);
      break;
    case FrameType::kGroupReport:
      if (leader_ != nullptr && tree_.HeadOf(from) == from) {
        OnReports(tree_.GroupOf(from), message.report, now);
      }
      break;
    case FrameType::kAnnounce:
    case FrameType::kPredict:
    case FrameType::kWithdraw: OnOrder(from, message); break;
    case FrameType::kPing:
      ReportAnew();
      outbox_.Send(from, FrameType::kPong);
      // A rank that asks rank 0 has a tensor near its deadline, which rank 0 may not have itself.
      if (leader_ != nullptr) CallRoll(now);
      break;
    case FrameType::kPong:
      if (leader_ != nullptr) {
        OnPong(from, now);
      } else if (from == 0) {
        roll_.OnAnswer(from, now);
      }
      break;
    case FrameType::kFail:
    case FrameType::kBye:
    case FrameType::kByeHeard: break;  // not for the sequencer
  }
  if (leader_ != nullptr) JudgeOverdue(now);
  starts_.Start(now);
}

// A direct or predicted tensor finishes without reports, so a late report may arrive when rank 0 is
// done with it.
bool Sequencer::FinishedHere(const Report& report) const {
  return leader_->WasSubmitted(report) && book_.Find(members_.rank, report.id()) == nullptr;
}

void Sequencer::OnReport(int rank, FrameType type, const Report& report, double now) {
  if (FinishedHere(report)) return;
  if (type == FrameType::kOverdue) {
    CallRoll(now);
    leader_->OnOverdue(report.id(), now);
  }
  OnReports({&rank, 1}, report, now);
}

void Sequencer::OnReports(std::span<const int> ranks, const Report& report, double now) {
  if (FinishedHere(report)) return;
  for (const int rank : ranks) {
    absl::Status differs = leader_->OnReport(rank, report);
    if (!differs.ok()) return Fail(std::move(differs));
  }
  if (ranks.front() == 0) prediction_->OnSubmitted(report, now);
  if (leader_->AllHave(report.id())) {
    if (leader_->Expects(report.id())) moved_ = now;
    prediction_->OnReady(report.id(), now);
    if (matching_ == Matching::kByTag) leader_->WithdrawBefore(report.id(), &withdrawing_);
    if (distrusts_) leader_->WithdrawReady(book_, &withdrawing_, &announcing_);
    Withdraw();
  }
  Announce();
  Predict();
}

void Sequencer::Announce() {
  leader_->Next(&announcing_);
  if (announcing_.empty()) return;
  starts_.Append(announcing_);
  PassOn(announcing_);
  announcing_.clear();
}

void Sequencer::PassOn(const std::vector<Announcement>& announcements) {
  for (const int child : tree_.children()) {
    outbox_.Send(child, FrameType::kAnnounce).announcements = announcements;
  }
}

void Sequencer::PassOn(const std::vector<PredictedChunk>& chunks) {
  for (const int child : tree_.children()) {
    outbox_.Send(child, FrameType::kPredict).predicted = chunks;
  }
}

void Sequencer::PassOn(const std::vector<Withdrawal>& withdrawn) {
  for (const int child : tree_.children()) {
    outbox_.Send(child, FrameType::kWithdraw).withdrawn = withdrawn;
  }
}

// Bytes under way at once: a chunk for each lane, and what the link carries in `seconds`.
size_t Sequencer::WindowBytes(double seconds) const {
  const double on_their_way = seconds * prediction_->bytes_per_s();
  return options_.chunk_bytes * options_.lanes + static_cast<size_t>(on_their_way);
}

void Sequencer::Predict() {
  // If all chunks start in one order, this step's chunks that are announced later would wait for
  // those of the next step, which ranks may submit only when this step is done.
  if (matching_ == Matching::kByOrder && !leader_->AllAnnounced()) return;
  Prediction::NextStep step = prediction_->Next();
  if (step.chunks.empty() || !predicts_) return;
  // If steps overlap, a tensor of the next one may be announced already, or over.
  for (const Report& tensor : step.tensors) {
    if (!leader_->AllHave(tensor.id()) && !FinishedHere(tensor)) leader_->Expect(tensor);
  }
  std::erase_if(step.chunks,
                [this](const PredictedChunk& chunk) { return !leader_->Expects(chunk.id); });
  if (step.chunks.empty()) return;
  distrusts_ = false;
  starts_.Append(step.chunks);
  PassOn(step.chunks);
}

// Takes effect after all earlier orders of rank 0, and before all later ones.
void Sequencer::Withdraw() {
  if (withdrawing_.empty()) return;
  starts_.Withdraw(withdrawing_);
  PassOn(withdrawing_);
  withdrawing_.clear();
}

void Sequencer::EndStep(double now) {
  if (leader_ == nullptr) return;
  const Report* const left_out = leader_->Unreported(0);
  if (left_out != nullptr && matching_ == Matching::kByOrder) {
    return Fail(absl::FailedPreconditionError(absl::StrCat(
        "tensor '", left_out->name, "' was predicted from the step before, but rank 0 ended its ",
        "step without having submitted it; call with the same tensors in every step that ",
        "end_step() ends")));
  }
  leader_->WithdrawAll(&withdrawing_);
  Withdraw();
  prediction_->EndStep(now);
  // The latency of an announcement, and that of the chunk's end on the way back.
  leader_->SetWindow(WindowBytes(2 * roll_.latency_s()));
  Predict();
  starts_.Start(now);
}

void Sequencer::ForgetStep(double now) {
  if (leader_ == nullptr) return;
  if (matching_ == Matching::kByTag) leader_->WithdrawAll(&withdrawing_);
  Withdraw();
  prediction_->ForgetStep(now);
  starts_.Start(now);
}

void Sequencer::OnOrder(int from, const OrderMessage& message) {
  if (from != tree_.parent() || leader_ != nullptr) {
    return Fail(absl::FailedPreconditionError(
        absl::StrCat("rank ", from, " sent an order of chunks to rank ", members_.rank,
                     ", expected one from rank ", tree_.parent(), " alone", kSameVersion)));
  }
  if (message.type == FrameType::kAnnounce) {
    PassOn(message.announcements);
    starts_.Append(message.announcements);
  } else if (message.type == FrameType::kPredict) {
    PassOn(message.predicted);
    starts_.Append(message.predicted);
  } else if (matching_ == Matching::kByTag) {
    PassOn(message.withdrawn);
    starts_.Withdraw(message.withdrawn);
  } else {
    Fail(absl::FailedPreconditionError(
        absl::StrCat("rank ", from, " withdrew predicted tensors, which stand in one order with ",
                     "all others on rank ", members_.rank, kSameVersion)));
  }
}

void Sequencer::OnHopDone(const StartChunk& chunk, double now) {
  moved_ = now;
  starts_.OnHopDone(chunk);
  starts_.Start(now);
}

void Sequencer::OnChunkDone(const StartChunk& chunk, bool last, double now) {
  starts_.OnDone(chunk);
  if (chunk.predicted) moved_ = now;
  if (leader_ != nullptr) {
    const OwnTensor* const own = book_.Find(members_.rank, chunk.id);
    const size_t bytes = own == nullptr ? 0 : ChunkBytes(*own->report);
    prediction_->OnChunkDone(chunk.started_s, now, bytes);
    if (last) prediction_->OnDone(chunk.id, now);
  }
  if (last) book_.Erase(members_.rank, chunk.id);
  if (leader_ != nullptr) {
    leader_->OnChunkDone(chunk.id, chunk.predicted);
    Announce();
    Predict();
  }
  starts_.Start(now);
}

void Sequencer::OnDirectDone(uint64_t id) {
  book_.Erase(members_.rank, id);
  if (leader_ != nullptr) leader_->Forget(id);
}

void Sequencer::CallRoll(double now) {
  for (int peer = 0; peer < (leader_ == nullptr ? 1 : members_.size); ++peer) {
    if (peer != members_.rank && roll_.Ask(peer, now)) outbox_.Send(peer, FrameType::kPing);
  }
}

void Sequencer::OnClock(double now) {
  FindOverdue(now);
  if (leader_ == nullptr) return;
  JudgeOverdue(now);
  if (matching_ == Matching::kByTag) EndStandstill(now);
}

void Sequencer::EndStandstill(double now) {
  if (now < moved_ + AnswerPatience(Seconds(options_.timeout))) return;
  leader_->WithdrawReady(book_, &withdrawing_, &announcing_);
  if (withdrawing_.empty()) return;
  distrusts_ = true;
  prediction_->ExpectWaits();
  Withdraw();
  Announce();
  starts_.Start(now);
}

void Sequencer::JudgeOverdue(double now) {
  for (const auto& [id, since] : leader_->overdue()) {
    const bool late = now >= since + AnswerPatience(Seconds(options_.timeout));
    if (!late && !roll_.IsSettled(now)) continue;
    const std::vector<int> silent = roll_.Silent(now);
    Fail(leader_->Diagnose(id, silent), static_cast<int>(silent.size()));
  }
}

void Sequencer::FindOverdue(double now) {
  const double timeout = Seconds(options_.timeout);
  book_.ForEach(members_.rank, [&](OwnTensor& own) {
    if (now >= own.submitted + (1.0 - kAhead) * timeout) CallRoll(now);
    if (!own.overdue && now >= own.submitted + timeout) {
      own.overdue = own.reported = true;
      own.overdue_since = now;
      SendReport(FrameType::kOverdue, *own.report, now);
    } else if (!own.reported && now >= own.submitted + kLate_s) {
      own.reported = true;
      SendReport(FrameType::kReport, *own.report, now);
    }
    if (own.overdue && (roll_.IsSilent(0, now) || now >= own.overdue_since + kGrace_s)) {
      const absl::Status reason = absl::DeadlineExceededError(absl::StrCat(
          "tensor '", own.report->name, "' passed its deadline on rank ", members_.rank,
          ", and rank 0, which orders the chunks, did not answer; look whether it is stopped or ",
          "its link is down"));
      Fail(reason, roll_.IsSilent(0, now) ? 1 : 0);
    }
  });
}

std::string Sequencer::Describe() const {
  std::string text = starts_.Describe();
  if (leader_ != nullptr) absl::StrAppend(&text, leader_->Describe());
  return text;
}

// The leader.

namespace {

std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::vector<int> Unset(const std::vector<bool>& flags) {
  std::vector<int> ranks;
  for (size_t r = 0; r < flags.size(); ++r) {
    if (!flags[r]) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

}  // namespace

Leader::Leader(int world, Policy policy, size_t window_bytes)
    : world_(world), policy_(policy), window_bytes_(window_bytes) {}

Leader::Tensor& Leader::Find(int rank, const Report& report) {
  if (Tensor* const known = tensors_.Find(report.id())) return *known;
  Tensor& tensor = tensors_.Insert(report.id());
  tensor.first = report;
  tensor.first_rank = rank;
  tensor.reported.assign(world_, false);
  tensor.reports = 0;
  tensor.submitted = tensor.complete = tensor.predicted = 0;
  tensor.announced = tensor.done = 0;
  largest_chunk_ = std::max(largest_chunk_, ChunkBytes(report));
  return tensor;
}

absl::Status Leader::OnReport(int rank, const Report& report) {
  Tensor& tensor = Find(rank, report);
  absl::Status differs = CheckAgreement(tensor.first_rank, tensor.first, rank, report);
  if (!differs.ok()) return differs;
  if (tensor.reported[rank]) return absl::OkStatus();
  tensor.reported[rank] = true;
  if (tensor.reports == 0) tensor.submitted = ++clock_;
  if (++tensor.reports == world_ && !tensor.first.direct) {
    tensor.complete = ++clock_;
    if (tensor.predicted == 0) ready_.push_back(report.id());
  }
  return absl::OkStatus();
}

void Leader::Expect(const Report& report) {
  Tensor& tensor = Find(0, report);
  tensor.predicted = ++clock_;
  tensor.announced = report.chunks;
  expected_.Push(report.id());
}

bool Leader::Expects(uint64_t id) const {
  const Tensor* const tensor = tensors_.Find(id);
  return tensor != nullptr && tensor->predicted != 0;
}

const Report* Leader::Unreported(int rank) const {
  const Report* found = nullptr;
  tensors_.ForEach([&](uint64_t, const Tensor& tensor) {
    if (found == nullptr && tensor.predicted != 0 && !tensor.reported[rank]) found = &tensor.first;
  });
  return found;
}

void Leader::WithdrawBefore(uint64_t id, std::vector<Withdrawal>* withdrawn) {
  const Tensor* const tensor = tensors_.Find(id);
  if (tensor != nullptr) Withdraw(tensor->predicted, withdrawn);
}

void Leader::WithdrawAll(std::vector<Withdrawal>* withdrawn) { Withdraw(clock_ + 1, withdrawn); }

// Withdraws the tensors with `predicted` below `before`: a step's tensors are predicted in the
// order in which rank 0 submitted them in the step before.
void Leader::Withdraw(uint64_t before, std::vector<Withdrawal>* withdrawn) {
  while (!expected_.empty()) {
    const uint64_t id = expected_.front();
    Tensor* const tensor = tensors_.Find(id);
    const bool open = tensor != nullptr && tensor->predicted != 0 && !tensor->reported[0];
    if (open && tensor->predicted >= before) return;
    expected_.Pop();
    if (!open) continue;
    withdrawn->push_back({id, tensor->first.chunks});
    if (tensor->reports == 0) {
      tensors_.Erase(id);
      continue;
    }
    tensor->predicted = 0;
    tensor->announced = 0;
  }
}

void Leader::WithdrawReady(TensorBook& book, std::vector<Withdrawal>* withdrawn,
                           std::vector<Announcement>* order) {
  tensors_.ForEach([&](uint64_t id, Tensor& tensor) {
    if (tensor.predicted == 0 || tensor.reports < world_) return;
    withdrawn->push_back({id, tensor.first.chunks});
    tensor.predicted = 0;
    const uint32_t started = book.Find(0, id)->started;
    for (tensor.announced = 0; tensor.announced < started; ++tensor.announced) {
      order->push_back({id, tensor.announced, 1});
    }
    if (started < tensor.first.chunks) ready_.push_back(id);
  });
}

bool Leader::AllHave(uint64_t id) const {
  const Tensor* const tensor = tensors_.Find(id);
  return tensor != nullptr && tensor->reports == world_;
}

bool Leader::Before(const Tensor& a, const Tensor& b) const {
  return GoesBefore(policy_, {a.submitted, a.complete, a.first.priority},
                    {b.submitted, b.complete, b.first.priority});
}

// True if another chunk will be announced before one of `bytes`, announced last, is finished.
bool Leader::FollowsSurely(size_t bytes) const {
  return !ready_.empty() && bytes + largest_chunk_ <= window_bytes_;
}

void Leader::Next(std::vector<Announcement>* order) {
  while (!ready_.empty()) {
    const auto first = std::min_element(
        ready_.begin(), ready_.end(),
        [this](uint64_t a, uint64_t b) { return Before(*tensors_.Find(a), *tensors_.Find(b)); });
    Tensor& tensor = *tensors_.Find(*first);
    const size_t bytes = ChunkBytes(tensor.first);
    // If the only unfinished chunk waits for a follower, the next one follows, however large.
    const bool over = unfinished_bytes_ + bytes > window_bytes_;
    if (over && unfinished_bytes_ > undrained_bytes_) break;
    unfinished_bytes_ += bytes;
    order->push_back({tensor.first.id(), tensor.announced, 0});
    if (++tensor.announced == tensor.first.chunks) ready_.erase(first);
    const bool follows = FollowsSurely(bytes);
    order->back().drain = follows ? 0 : 1;
    undrained_bytes_ = follows ? bytes : 0;
  }
}

void Leader::OnSubmitted(const Report& report) { calls_.Insert(report.key) = report.call + 1; }

bool Leader::WasSubmitted(const Report& report) const {
  const uint64_t* const calls = calls_.Find(report.key);
  return calls != nullptr && report.call < *calls;
}

void Leader::OnOverdue(uint64_t id, double now) {
  const auto known = [id](const Overdue& overdue) { return overdue.id == id; };
  if (std::any_of(overdue_.begin(), overdue_.end(), known)) return;
  overdue_.push_back({id, now});
}

void Leader::OnChunkDone(uint64_t id, bool predicted) {
  Tensor* const tensor = tensors_.Find(id);
  if (tensor == nullptr) return;
  if (!predicted) unfinished_bytes_ -= ChunkBytes(tensor->first);
  if (++tensor->done == tensor->first.chunks) tensors_.Erase(id);
}

std::string Leader::WaitingFor(int rank, uint64_t except) const {
  std::string waiting;
  tensors_.ForEach([&](uint64_t id, const Tensor& tensor) {
    if (!waiting.empty() || id == except) return;
    if (!tensor.reported[rank] || tensor.reports == world_) return;
    waiting = absl::StrCat("; rank ", rank, " has '", tensor.first.name, "' ready instead");
  });
  return waiting;
}

// The first predicted tensor before a late one that some rank has not submitted: its chunks hold
// the lanes that the late one waits for.
const Leader::Tensor* Leader::HoldsUp(const Tensor& late) const {
  const Tensor* first = nullptr;
  tensors_.ForEach([&](uint64_t, const Tensor& tensor) {
    const bool before = tensor.predicted != 0 && tensor.predicted < late.predicted;
    if (!before || tensor.reports == world_) return;
    if (first == nullptr || tensor.predicted < first->predicted) first = &tensor;
  });
  return first;
}

absl::Status Leader::NeverSubmitted(const Tensor& tensor, const std::string& consequence,
                                    const std::vector<int>& silent, const std::string& fix) const {
  const std::vector<int> missing = Unset(tensor.reported);
  const bool stopped = std::includes(silent.begin(), silent.end(), missing.begin(), missing.end());
  const std::string help =
      stopped ? ", and no answer comes from there; look whether the process is stopped or its link "
                "is down"
              : absl::StrCat(WaitingFor(missing.front(), tensor.first.id()), "; ", fix,
                             "let every rank make the same calls, or raise the timeout");
  return absl::DeadlineExceededError(absl::StrCat(
      "tensor '", tensor.first.name, "' (", DescribeReport(tensor.first), ") ", consequence, ": ",
      Ranks(missing), " never submitted it, expected a call on all ", world_, " ranks", help));
}

absl::Status Leader::Diagnose(uint64_t id, const std::vector<int>& silent) const {
  const Tensor* const tensor = tensors_.Find(id);
  if (tensor == nullptr) return absl::DeadlineExceededError("a tensor passed its deadline");
  if (tensor->reports < world_) return NeverSubmitted(*tensor, "passed its deadline", silent, "");
  if (const Tensor* const holding = HoldsUp(*tensor)) {
    return NeverSubmitted(
        *holding,
        absl::StrCat("was predicted from the step before and holds up '", tensor->first.name, "'"),
        silent,
        absl::StrCat("submit it before you wait for '", tensor->first.name,
                     "', as in the step before, or have no order predicted (planned), and "));
  }
  const std::string subject =
      absl::StrCat("tensor '", tensor->first.name, "' (", DescribeReport(tensor->first),
                   ") passed its deadline: ");
  if (!silent.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(subject, Ranks(silent), " submitted it and then fell silent",
                     "; look whether the process is stopped or its link is down"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(subject, "all ranks submitted it, but the exchange did not finish",
                   "; look at the link, or raise the timeout"));
}

std::string Leader::Describe() const {
  std::string text;
  tensors_.ForEach([&](uint64_t, const Tensor& tensor) {
    if (tensor.reports == world_) return;
    absl::StrAppend(&text, "tensor '", tensor.first.name, "' call ", tensor.first.call,
                    tensor.predicted == 0 ? "" : " (predicted)", " waits for ",
                    Ranks(Unset(tensor.reported)), " to submit it\n");
  });
  return text;
}

}  // namespace thinwire
