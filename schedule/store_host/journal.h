// Journal: the file from which a killed server comes back. It is the server's inputs in the order
// in which they were applied (StoreRecord), behind a snapshot of it once there was one; a new
// process replays them through the same code and has the same bits.
//
// One value's walk: a worker encodes a gradient and sends it; the server appends the message to its
// journal, as it came, and only then applies and answers it. When the server is killed, the worker
// keeps what was not answered. Started again with its rank and folder, the server reads the file,
// listens on its former port, and the worker sends those messages again, in their order; what the
// journal has is answered and not applied twice. An append is in the page cache, so it survives
// the process's end; with durable=fsync it is on the disk, and survives the machine's.
//
// The file FOLDER/server-N.journal holds records, one after another, in the host's byte order: a
// header of 48 bytes (RecordHeader in journal.cc), the head and the body. The first one tells the
// run that the file is of. When inputs have grown by the bound, and by as much as the snapshot
// takes, a new file is written beside it, with a snapshot, and renamed over it.
//
// A record that the file's end cuts, or the last one when its digest differs, was being written
// when the process or machine died; nobody was told that it was applied, and it is dropped. A file
// system may have recorded the file's length before its bytes: zeros at the end count as not
// written. (An fsync that lied is found out by the next push, whose number does not follow.) Any
// other record whose digest differs is DataLoss.
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
    std::string id;  // of the members' key (GroupKey::fingerprint): another one in each run
    int server = 0, servers = 1, workers = 1;
    int port = 0;  // that the server listens on; 0: none
  };
  using Take = std::function<absl::Status(const StoreRecord&)>;

  // Opens the folder's journal of a server, and creates both where there is none.
  // FailedPrecondition if another process has it open; DataLoss if its first record can't be read;
  // InvalidArgument if the folder can't be written. All errors name the file.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const JournalSpec& spec, int server);

  // The run of an earlier process's file.
  const std::optional<Run>& former() const { return former_; }
  // By the file system's clock, before this process has written.
  std::chrono::system_clock::time_point last_written() const { return last_written_; }
  // Once, before the rest. Goes on with the file of this run; FailedPrecondition if it is of other
  // numbers of members. The file of another run is renamed to *.old, over an earlier one.
  absl::Status Begin(const Run& run);
  // The records that were there, each once, and then nothing, and Append may be called. DataLoss
  // names the damaged record.
  absl::StatusOr<std::optional<StoreRecord>> Next();

  // When it returns, the record survives the process. Unavailable when it could not be written.
  absl::Status Append(const StoreRecord& record);
  // It is time for a snapshot.
  bool is_full() const { return appended_ >= spec_.bytes && appended_ >= snapshot_bytes_; }
  // Replaces the file by what `snapshot` gives to its argument.
  absl::Status Rotate(const std::function<absl::Status(const Take&)>& snapshot);
  // The run is over.
  void Remove();

  const std::string& path() const { return path_; }

 private:
  Journal(JournalSpec spec, std::string path) : spec_(std::move(spec)), path_(std::move(path)) {}

  absl::Status OpenForReading();
  // The next record, or nothing at the end of what is whole.
  absl::StatusOr<std::optional<StoreRecord>> Read();
  // After what was read, to the end of the file.
  bool OnlyZerosFollow();
  absl::Status ReadRun();
  absl::Status Write(int fd, const StoreRecord& record);
  absl::Status Sync(int fd) const;
  absl::Status Failed(std::string_view what) const;  // by errno

  const JournalSpec spec_;
  const std::string path_;
  std::optional<Run> former_;
  std::chrono::system_clock::time_point last_written_;
  Run run_;
  Descriptor file_;
  std::ifstream in_;
  uint64_t at_ = 0, size_ = 0;   // of what is read
  uint64_t appended_ = 0;        // bytes of inputs since the snapshot
  uint64_t snapshot_bytes_ = 0;  // of the snapshot
  uint64_t written_ = 0;         // bytes of this process
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_JOURNAL_H_
