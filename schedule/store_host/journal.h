// Journal: the file from which a killed server is restored. It holds the latest snapshot, if any,
// and then the server's inputs (StoreRecord) in the order in which they were applied. A new process
// replays them through the same code, which yields the same bits.
//
// How a gradient survives a crash: a worker encodes it and sends it. The server appends the message
// to its journal unchanged, and only then applies and answers it. When the server is killed, the
// worker keeps its unanswered messages. The server, started again with its rank and folder, reads
// the file and listens on its former port. The worker then sends those messages again, in order;
// the server answers those that the journal holds without applying them twice. An appended record
// is in the page cache and survives the process; with durable=fsync it is on the disk and survives
// a crash of the machine.
//
// The file FOLDER/server-N.journal is a sequence of records in the host's byte order, each a header
// of 48 bytes (RecordHeader in journal.cc), the head and the body. The first record identifies the
// run. When the inputs since the last snapshot reach both the bound and the snapshot's size, a new
// file with a snapshot is written beside the old one and renamed over it.
//
// A record that is cut by the file's end, or the last one if its digest differs, was being written
// when the process or machine died. No worker has an answer to it, so it is dropped. A file system
// may have recorded the file's length before its bytes, so zeros at the end count as not written.
// (If an fsync had no effect, the next push fails, since its number does not follow.) Any other
// record whose digest differs is DataLoss.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_JOURNAL_H_
#define THINWIRE_SCHEDULE_STORE_HOST_JOURNAL_H_

#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/store/server.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

struct JournalSpec {
  std::string folder;
  uint64_t bytes = uint64_t{1} << 30;  // inputs between two snapshots
  bool fsync = false;

  // Parses "FOLDER", "FOLDER,bytes=1000000,durable=fsync". InvalidArgument for another setting.
  static absl::StatusOr<JournalSpec> Parse(std::string_view text);
};

class Journal {
 public:
  struct Run {
    std::string id;  // fingerprint of the members' GroupKey, unique per run
    int server = 0, servers = 1, workers = 1;
    int port = 0;  // where the server listens; 0: none
  };
  using Take = std::function<absl::Status(const StoreRecord&)>;

  // Opens the server's journal in the folder; creates folder and file if missing.
  // FailedPrecondition if another process has it open; DataLoss if its first record can't be read;
  // InvalidArgument if the folder can't be written. All errors name the file.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const JournalSpec& spec, int server);

  // The run of the file that an earlier process left.
  const std::optional<Run>& former() const { return former_; }
  // When an earlier process last wrote the file, by the file system's clock.
  std::chrono::system_clock::time_point last_written() const { return last_written_; }
  // Call once, before the methods below; only Next and Remove work without it. Continues the file
  // of this run; FailedPrecondition if its numbers of members differ. Renames the file of another
  // run to *.old, replacing an earlier one.
  absl::Status Begin(const Run& run);
  // Returns the former records one by one, then nullopt; from then on Append may be called.
  // DataLoss names the damaged record.
  absl::StatusOr<std::optional<StoreRecord>> Next();

  // When it returns, the record survives the process. Unavailable when it could not be written.
  absl::Status Append(const StoreRecord& record);
  // True if a snapshot is due.
  bool is_full() const { return appended_ >= spec_.bytes && appended_ >= snapshot_bytes_; }
  // Replaces the file by the records that `snapshot` passes to its argument.
  absl::Status Rotate(const std::function<absl::Status(const Take&)>& snapshot);
  // Removes the file. Call when the run is over.
  void Remove();

  const std::string& path() const { return path_; }

 private:
  Journal(JournalSpec spec, std::string path) : spec_(std::move(spec)), path_(std::move(path)) {}

  absl::Status OpenForReading();
  // The next record; nullopt after the last complete one.
  absl::StatusOr<std::optional<StoreRecord>> Read();
  // True if the rest of the file is zeros.
  bool OnlyZerosFollow();
  absl::Status ReadRun();
  absl::Status Write(int fd, const StoreRecord& record);
  absl::Status Sync(int fd) const;
  absl::Status Failed(std::string_view what) const;  // reason: errno

  const JournalSpec spec_;
  const std::string path_;
  std::optional<Run> former_;
  std::chrono::system_clock::time_point last_written_;
  Run run_;
  Descriptor file_;
  std::ifstream in_;
  uint64_t at_ = 0, size_ = 0;   // of the file being read: position and size in bytes
  uint64_t appended_ = 0;        // bytes of inputs since the last snapshot
  uint64_t snapshot_bytes_ = 0;  // size of the last snapshot
  uint64_t written_ = 0;         // bytes that this process has written
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_JOURNAL_H_
