#include "schedule/store_host/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

constexpr uint32_t kMagic = 0x316a7774;  // "twj1"
constexpr mode_t kOwnerOnly = 0600;      // the file holds the model

struct RecordHeader {
  uint32_t magic = kMagic;
  uint32_t kind = 0;
  int32_t worker = 0, detail = 0;
  uint32_t head_bytes = 0, reserved = 0;
  uint64_t body_bytes = 0;
  uint64_t digest = 0;  // of the head and the body
  uint64_t check = 0;   // DigestBytes of the fields above

  uint64_t Check() const {
    return DigestBytes({reinterpret_cast<const uint8_t*>(this), offsetof(RecordHeader, check)});
  }
  uint64_t bytes() const { return sizeof(*this) + head_bytes + body_bytes; }
};
static_assert(sizeof(RecordHeader) == 48, "headers have no padding");

uint64_t DigestOf(const StoreRecord& record) {
  const auto* head = reinterpret_cast<const uint8_t*>(record.head.data());
  return HashCombine(DigestBytes({head, record.head.size()}), DigestBytes(record.body));
}

std::string TextOf(const Journal::Run& run) {
  return absl::StrCat(run.id, " ", run.server, " ", run.servers, " ", run.workers, " ", run.port);
}

bool Parse(const std::string& text, Journal::Run* run) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  if (words.size() != 5) return false;
  run->id = words[0];
  return absl::SimpleAtoi(words[1], &run->server) && absl::SimpleAtoi(words[2], &run->servers) &&
         absl::SimpleAtoi(words[3], &run->workers) && absl::SimpleAtoi(words[4], &run->port);
}

std::string Members(const Journal::Run& run) {
  return absl::StrCat("server ", run.server, " of ", run.servers, " with ", run.workers,
                      " workers");
}

}  // namespace

absl::StatusOr<JournalSpec> JournalSpec::Parse(std::string_view text) {
  JournalSpec spec;
  const std::vector<std::string> parts = absl::StrSplit(std::string(text), ',');
  spec.folder = parts[0];
  bool good = !spec.folder.empty();
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::vector<std::string> pair = absl::StrSplit(parts[i], absl::MaxSplits('=', 1));
    if (pair[0] == "bytes" && pair.size() == 2) {
      good = good && absl::SimpleAtoi(pair[1], &spec.bytes) && spec.bytes > 0;
    } else if (parts[i] == "durable=fsync") {
      spec.fsync = true;
    } else {
      good = false;
    }
  }
  if (good) return spec;
  return absl::InvalidArgumentError(absl::StrCat(
      "the store's journal is '", std::string(text),
      "', expected a folder, with ,bytes=N (inputs between two snapshots) or ,durable=fsync"));
}

absl::Status Journal::Failed(std::string_view what) const {
  const char* const reason = std::strerror(errno);
  return absl::UnavailableError(
      absl::StrCat("the journal ", path_, " can't be ", std::string(what), ": ", reason));
}

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(const JournalSpec& spec, int server) {
  std::unique_ptr<Journal> journal(
      new Journal(spec, absl::StrCat(spec.folder, "/server-", server, ".journal")));
  std::error_code made;
  std::filesystem::create_directories(spec.folder, made);
  if (absl::Status bad = journal->OpenForReading(); !bad.ok()) return bad;
  if (absl::Status bad = journal->ReadRun(); !bad.ok()) return bad;
  return journal;
}

absl::Status Journal::OpenForReading() {
  struct stat opened {
  }, named{};
  do {
    file_ = Descriptor(open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, kOwnerOnly));
    if (!file_.valid()) {
      return absl::InvalidArgumentError(absl::StrCat(
          Failed("opened").message(), "; name a folder that this process may write to"));
    }
    if (flock(file_.fd(), LOCK_EX | LOCK_NB) != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "another process writes the journal ", path_,
          ": a server of this number is still running; end it, or give each run a folder"));
    }
    if (fstat(file_.fd(), &opened) != 0) return Failed("read");
    // The former holder of the lock may have renamed a new file over this one.
  } while (stat(path_.c_str(), &named) != 0 || named.st_ino != opened.st_ino);
  size_ = static_cast<uint64_t>(opened.st_size);
  last_written_ = std::chrono::system_clock::from_time_t(opened.st_mtime);
  in_.open(path_, std::ios::binary);
  return in_ ? absl::OkStatus() : Failed("read");
}

absl::Status Journal::ReadRun() {
  absl::StatusOr<std::optional<StoreRecord>> record = Read();
  if (!record.ok()) return record.status();
  if (!record->has_value()) return absl::OkStatus();
  Run run;
  if ((*record)->kind != StoreRecord::Kind::kRun || !Parse((*record)->head, &run)) {
    return absl::DataLossError(absl::StrCat("the journal ", path_, " does not begin with its run; ",
                                            "remove the file, or name another folder"));
  }
  former_ = std::move(run);
  return absl::OkStatus();
}

absl::Status Journal::Begin(const Run& run) {
  run_ = run;
  if (former_.has_value() && former_->id == run.id) {
    if (Members(*former_) == Members(run)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the journal ", path_, " is of ", Members(*former_), ", expected ",
                     Members(run), "; start the server with the numbers of its run"));
  }
  if (former_.has_value()) {
    // The workers of that run are gone, so it can't be continued.
    if (std::rename(path_.c_str(), (path_ + ".old").c_str()) != 0) return Failed("renamed");
    in_.close();
    if (absl::Status bad = OpenForReading(); !bad.ok()) return bad;
  }
  at_ = size_ = 0;
  if (ftruncate(file_.fd(), 0) != 0) return Failed("written");
  in_.close();
  const StoreRecord record{.kind = StoreRecord::Kind::kRun, .head = TextOf(run), .body = {}};
  if (absl::Status bad = Write(file_.fd(), record); !bad.ok()) return bad;
  return Sync(file_.fd());
}

absl::StatusOr<std::optional<StoreRecord>> Journal::Next() {
  absl::StatusOr<std::optional<StoreRecord>> record = Read();
  if (!record.ok() || record->has_value()) return record;
  in_.close();
  if (at_ < size_ && ftruncate(file_.fd(), static_cast<off_t>(at_)) != 0) return Failed("written");
  size_ = at_;
  return record;
}

absl::StatusOr<std::optional<StoreRecord>> Journal::Read() {
  RecordHeader header;
  if (size_ - at_ < sizeof(header)) return std::nullopt;
  const auto damaged = [&](std::string_view what) {
    return absl::DataLossError(absl::StrCat(
        "the journal ", path_, " is damaged: of the record at byte ", at_, " of ", size_, " the ",
        std::string(what), "; restore the file, or start the run again from saved states"));
  };
  in_.read(reinterpret_cast<char*>(&header), sizeof(header));
  if (!in_) return Failed("read");
  if (header.magic != kMagic || header.check != header.Check()) {
    if (OnlyZerosFollow()) return std::nullopt;
    return damaged(
        absl::StrCat("header's digest is ", header.check, ", expected ", header.Check()));
  }
  if (header.body_bytes > size_ || header.bytes() > size_ - at_) return std::nullopt;
  StoreRecord record{.kind = static_cast<StoreRecord::Kind>(header.kind),
                     .worker = header.worker,
                     .detail = header.detail,
                     .head = std::string(header.head_bytes, '\0'),
                     .body = std::vector<uint8_t>(header.body_bytes)};
  in_.read(record.head.data(), static_cast<std::streamsize>(record.head.size()));
  in_.read(reinterpret_cast<char*>(record.body.data()),
           static_cast<std::streamsize>(record.body.size()));
  if (!in_) return Failed("read");
  if (const uint64_t digest = DigestOf(record); digest != header.digest) {
    if (OnlyZerosFollow()) return std::nullopt;
    return damaged(absl::StrCat("digest is ", digest, ", expected ", header.digest));
  }
  at_ += header.bytes();
  const bool of_snapshot =
      record.kind == StoreRecord::Kind::kServer || record.kind == StoreRecord::Kind::kSlice;
  (of_snapshot ? snapshot_bytes_ : appended_) += header.bytes();
  return record;
}

bool Journal::OnlyZerosFollow() {
  for (char byte = 0; in_.get(byte);) {
    if (byte != 0) return false;
  }
  return !in_.bad();
}

absl::Status Journal::Write(int fd, const StoreRecord& record) {
  RecordHeader header{.kind = static_cast<uint32_t>(record.kind),
                      .worker = record.worker,
                      .detail = record.detail,
                      .head_bytes = static_cast<uint32_t>(record.head.size()),
                      .body_bytes = record.body.size(),
                      .digest = DigestOf(record)};
  header.check = header.Check();
  iovec parts[] = {{&header, sizeof(header)},
                   {const_cast<char*>(record.head.data()), record.head.size()},
                   {const_cast<uint8_t*>(record.body.data()), record.body.size()}};
  iovec* part = parts;
  iovec* const end = parts + std::size(parts);
  while (part != end) {
    const ssize_t wrote = writev(fd, part, static_cast<int>(end - part));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return Failed("written");
    auto left = static_cast<size_t>(wrote);
    for (; part != end && left >= part->iov_len; ++part) left -= part->iov_len;
    if (part == end) break;
    part->iov_base = static_cast<char*>(part->iov_base) + left;
    part->iov_len -= left;
  }
  written_ += header.bytes();
  return absl::OkStatus();
}

absl::Status Journal::Sync(int fd) const {
  if (!spec_.fsync || fdatasync(fd) == 0) return absl::OkStatus();
  return Failed("synchronised");
}

absl::Status Journal::Append(const StoreRecord& record) {
  const uint64_t before = written_;
  if (absl::Status bad = Write(file_.fd(), record); !bad.ok()) return bad;
  appended_ += written_ - before;
  return Sync(file_.fd());
}

absl::Status Journal::Rotate(const std::function<absl::Status(const Take&)>& snapshot) {
  const std::string draft = path_ + ".new";
  Descriptor file(
      open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, kOwnerOnly));
  if (!file.valid() || flock(file.fd(), LOCK_EX | LOCK_NB) != 0) return Failed("replaced");
  const uint64_t before = written_;
  const StoreRecord run{.kind = StoreRecord::Kind::kRun, .head = TextOf(run_), .body = {}};
  absl::Status status = Write(file.fd(), run);
  const auto take = [&](const StoreRecord& record) { return Write(file.fd(), record); };
  if (status.ok()) status = snapshot(take);
  if (status.ok()) status = Sync(file.fd());
  if (!status.ok()) {
    std::remove(draft.c_str());
    return status;
  }
  if (std::rename(draft.c_str(), path_.c_str()) != 0) return Failed("replaced");
  file_ = std::move(file);
  snapshot_bytes_ = written_ - before;
  appended_ = 0;
  if (!spec_.fsync) return absl::OkStatus();
  const Descriptor folder(open(spec_.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return folder.valid() && fsync(folder.fd()) == 0 ? absl::OkStatus() : Failed("replaced");
}

void Journal::Remove() { std::remove(path_.c_str()); }

}  // namespace thinwire
