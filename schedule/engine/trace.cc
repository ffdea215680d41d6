#include "schedule/engine/trace.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

// Names come from the user; JSON wants quotes, backslashes and control characters escaped.
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

std::string PathOfRank(const std::string& path, int rank) {
  std::filesystem::path file(path);
  const std::string extension = file.has_extension() ? file.extension().string() : ".json";
  file.replace_extension(absl::StrCat(".rank", rank, extension));
  return file.string();
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

}  // namespace thinwire
