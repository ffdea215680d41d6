#include "schedule/engine/records.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "schedule/collective/partition.h"

namespace thinwire {
namespace {

constexpr std::array<const char*, 9> kNames = {"submitted", "started",    "hop begun",
                                               "hop ended", "chunk done", "tensor done",
                                               "frame out", "frame in",   "failed"};
constexpr std::array<const char*, 13> kFrames = {
    "?",    "report", "announce",     "overdue", "fail",          "goodbye", "predict",
    "ping", "pong",   "group report", "none",    "goodbye heard", "withdraw"};

int64_t Now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

std::string PeerOf(int peer) {
  return peer < 0 ? std::string("everyone") : absl::StrCat("rank ", peer);
}

// Names come from the user; JSON requires escaped quotes, backslashes and control characters.
std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&out, "\\u", absl::Hex(static_cast<int>(c), absl::kZeroPad4));
    } else {
      out += c;
    }
  }
  return out;
}

double Microseconds(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

}  // namespace

Records::Records(const Membership& members, const Options& options)
    : way_(DescribeWay(members.size, options)), slots_(std::make_unique<Slot[]>(kEvents)) {
  if (!options.trace_path.empty() && members.size > 1) {
    trace_.emplace(options.trace_path, members.rank);
  }
}

void Records::Event(FlightEvent event, std::string_view name, uint32_t chunk, int peer,
                    uint64_t detail) {
  Entry entry{.nanoseconds = Now(),
              .detail = detail,
              .chunk = chunk,
              .peer = static_cast<int16_t>(peer),
              .event = event};
  entry.name_bytes = static_cast<uint8_t>(std::min(name.size(), entry.name.size()));
  std::memcpy(entry.name.data(), name.data(), entry.name_bytes);
  std::array<uint64_t, kWords> words;
  std::memcpy(words.data(), &entry, sizeof(entry));

  const uint64_t number = events_.fetch_add(1, std::memory_order_relaxed) + 1;
  Slot& slot = slots_[number % kEvents];
  // If a thread is still writing this slot since the last lap, this event is lost: two writers of
  // one slot would leave a mixture of two events.
  uint64_t held = slot.number.load(std::memory_order_relaxed);
  if (held == kBeingWritten || held > number ||
      !slot.number.compare_exchange_strong(held, kBeingWritten, std::memory_order_acquire)) {
    return;
  }
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.number.store(number, std::memory_order_release);
}

bool Records::Read(uint64_t number, Entry* entry) const {
  const Slot& slot = slots_[number % kEvents];
  if (slot.number.load(std::memory_order_acquire) != number) return false;
  std::array<uint64_t, kWords> words;
  for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
  std::memcpy(static_cast<void*>(entry), words.data(), sizeof(*entry));
  return slot.number.load(std::memory_order_acquire) == number;
}

std::string Records::LastEvents() const {
  const uint64_t last = events_.load(std::memory_order_acquire);
  const uint64_t first = last > kEvents ? last - kEvents + 1 : 1;
  const int64_t now = Now();
  std::string text = absl::StrCat("dense allreduces go ", way_, "\n");
  for (uint64_t number = first; number <= last; ++number) {
    Entry e;
    if (!Read(number, &e)) continue;
    const std::string_view name(e.name.data(), e.name_bytes);
    // An event later than the start of this loop counts as now.
    const int64_t ago = std::max<int64_t>(0, now - e.nanoseconds);
    absl::StrAppendFormat(&text, "-%.6f s  %s", 1e-9 * static_cast<double>(ago),
                          kNames[static_cast<size_t>(e.event)]);
    if (e.event == FlightEvent::kFrameOut || e.event == FlightEvent::kFrameIn) {
      absl::StrAppend(&text, " ", kFrames[e.detail < kFrames.size() ? e.detail : 0],
                      e.event == FlightEvent::kFrameOut ? " to " : " from ", PeerOf(e.peer));
      if (!name.empty()) absl::StrAppend(&text, " about '", std::string(name), "'");
    } else {
      absl::StrAppend(&text, " '", std::string(name), "'");
      if (e.event == FlightEvent::kSubmitted) absl::StrAppend(&text, " ", e.detail, " elements");
      if (e.event == FlightEvent::kStarted || e.event == FlightEvent::kChunkDone ||
          e.event == FlightEvent::kHopBegun || e.event == FlightEvent::kHopEnded) {
        absl::StrAppend(&text, " chunk ", e.chunk);
      }
      if (e.event == FlightEvent::kStarted && e.detail != 0) absl::StrAppend(&text, ", predicted");
      if (e.event == FlightEvent::kHopBegun || e.event == FlightEvent::kHopEnded) {
        absl::StrAppend(&text, " hop ", e.detail);
      }
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string PathOfRank(const std::string& path, int rank) {
  std::filesystem::path file(path);
  const std::string extension = file.has_extension() ? file.extension().string() : ".json";
  file.replace_extension(absl::StrCat(".rank", rank, extension));
  return file.string();
}

absl::Status CheckPathOfRank(const char* setting, const std::string& path, int rank) {
  if (path.empty()) return absl::OkStatus();
  const std::string file = PathOfRank(path, rank);
  int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd >= 0) {
    unlink(file.c_str());
  } else if (errno == EEXIST) {
    fd = open(file.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
  }
  if (fd >= 0) {
    close(fd);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "rank ", rank, ": ", setting, " is '", path, "', but ", file, " can't be written: ",
      std::strerror(errno), "; name a file in a folder that exists and is writable"));
}

void Trace::Add(int row, TraceEvent event) {
  const absl::MutexLock lock(&mu_);
  if (rows_.size() <= static_cast<size_t>(row)) rows_.resize(row + 1);
  if (rows_[row].size() < kMaxEvents) rows_[row].push_back(std::move(event));
}

void Trace::Put(std::ostream& out, size_t row, const TraceEvent& event) const {
  const auto begin_of = [&](const char* phase) -> std::ostream& {
    return out << ",\n{\"name\":\"" << kStageNames[static_cast<int>(event.stage)] << "\",\"ph\":\""
               << phase << "\",\"pid\":" << rank_ << ",\"tid\":" << row;
  };
  const std::string args = absl::StrCat(",\"args\":{\"tensor\":\"", Escaped(event.name),
                                        "\",\"chunk\":", event.chunk, "}}");
  if (event.stage != Stage::kQueue) {
    begin_of("X") << ",\"ts\":" << Microseconds(event.begin.time_since_epoch())
                  << ",\"dur\":" << Microseconds(event.end - event.begin) << args;
    return;
  }
  // A chunk waits while its lane carries others, so the slices of a row would overlap.
  const std::string id = absl::StrCat(",\"cat\":\"queue\",\"id\":\"", Escaped(event.name), "/",
                                      event.chunk, "/", rank_, "\"");
  begin_of("b") << id << ",\"ts\":" << Microseconds(event.begin.time_since_epoch()) << args;
  begin_of("e") << id << ",\"ts\":" << Microseconds(event.end.time_since_epoch()) << args;
}

absl::Status Trace::Write() const {
  std::ofstream out(path_);
  out << "[{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" << rank_
      << ",\"args\":{\"name\":\"rank " << rank_ << "\"}}";
  out.precision(15);
  const absl::MutexLock lock(&mu_);
  for (size_t row = 0; row < rows_.size(); ++row) {
    for (const TraceEvent& event : rows_[row]) Put(out, row, event);
  }
  out << "]\n";
  if (out.flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write the trace to ", path_));
}

uint64_t Records::AddCollective(uint64_t raw_bytes) {
  raw_bytes_ += raw_bytes;
  return ++collectives_;
}

void Records::AddStage(Stage stage, const std::string& tensor, uint32_t chunk, int row,
                       Clock::time_point begin, Clock::time_point end) {
  nanoseconds_[static_cast<int>(stage)] += std::chrono::nanoseconds(end - begin).count();
  if (trace_.has_value()) trace_->Add(row, {tensor, chunk, stage, begin, end});
}

Stats Records::stats() const {
  Stats stats;
  stats.all_reduces = collectives_;
  stats.raw_bytes = raw_bytes_;
  stats.predicted_chunks = predicted_;
  for (int stage = 0; stage < kStages; ++stage) stats.seconds[stage] = 1e-9 * nanoseconds_[stage];
  return stats;
}

absl::Status Records::WriteTrace() const {
  return trace_.has_value() ? trace_->Write() : absl::OkStatus();
}

}  // namespace thinwire
