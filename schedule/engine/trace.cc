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

Trace::Trace(const std::string& path, int rank, int lanes)
    : path_(PathOfRank(path, rank)), rank_(rank), lanes_(lanes) {}

void Trace::Add(int lane, TraceEvent event) {
  if (lanes_[lane].size() < kMaxEvents) lanes_[lane].push_back(std::move(event));
}

void Trace::Put(std::ostream& out, size_t lane, const TraceEvent& event) const {
  const auto begin_of = [&](const char* phase) -> std::ostream& {
    return out << ",\n{\"name\":\"" << kStageNames[static_cast<int>(event.stage)] << "\",\"ph\":\""
               << phase << "\",\"pid\":" << rank_ << ",\"tid\":" << lane;
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
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    for (const TraceEvent& event : lanes_[lane]) Put(out, lane, event);
  }
  out << "]\n";
  if (out.flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write the trace to ", path_));
}

}  // namespace thinwire
