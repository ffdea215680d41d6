// StoreWorker's Save and Load: worker 0's file of the servers' states and each worker's file of its
// residuals (StateFileWriter in schedule/store/bytes.h).
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/hash.h"
#include "schedule/store/bytes.h"
#include "schedule/store/server.h"
#include "schedule/store_host/worker.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

// Key of the entry with the save's number and the number of workers, in a file of residuals. Users'
// keys have no line breaks.
constexpr std::string_view kPartHead = "\nresiduals";

std::string PartOf(const std::string& path, int rank) {
  return absl::StrCat(path, ".worker-", rank);
}

// The name includes the process, since other processes may save to the same path.
std::string DraftOf(const std::string& path) { return absl::StrCat(path, ".tmp-", getpid()); }

absl::Status NotSaved(const std::string& path) {
  const char* const reason = std::strerror(errno);
  return absl::InvalidArgumentError(absl::StrCat("can't write ", path, ": ", reason));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string file;
  // read() reports the error of a directory or a disk as a state; iterators would throw.
  for (std::vector<char> part(1 << 20); in;) {
    in.read(part.data(), std::ssize(part));
    file.append(part.data(), static_cast<size_t>(in.gcount()));
  }
  if (!in.eof()) return absl::InvalidArgumentError("it can't be read");
  return file;
}

}  // namespace

absl::Status StoreWorker::Save(const std::string& path) {
  if (absl::Status bad = Barrier(); !bad.ok()) return bad;
  std::vector<std::string> files;
  const absl::Status written = WriteFiles(path, &files);
  // The previous save's files are replaced only if all workers have written theirs.
  const std::string body(written.ok() ? std::string(kSaves)
                                      : absl::StrCat(std::string(kComplaint), written.message()));
  absl::Status saved =
      CallAll(Together::kBarrier, std::vector<std::string>(resenders_.size(), body));
  const bool all_written = saved.ok();
  if (saved.ok()) saved = written;  // a worker that catches up makes no call; only it fails
  for (const std::string& file : files) {
    if (saved.ok() && std::rename(DraftOf(file).c_str(), file.c_str()) != 0) saved = NotSaved(file);
    if (!saved.ok()) std::remove(DraftOf(file).c_str());
  }
  const absl::Status all = all_written ? Barrier() : saved;
  return saved.ok() ? all : saved;
}

absl::Status StoreWorker::WriteFiles(const std::string& path, std::vector<std::string>* files) {
  if (rank_ == 0) {
    const absl::StatusOr<std::string> file = StatesAsFile();
    if (!file.ok()) return file.status();
    if (absl::Status bad = WriteDraft(path, *file, files); !bad.ok()) return bad;
  }
  const absl::StatusOr<uint64_t> save = SaveNumber();
  if (!save.ok()) return save.status();
  return WriteDraft(PartOf(path, rank_), ResidualsAsFile(*save), files);
}

absl::Status StoreWorker::WriteDraft(const std::string& path, const std::string& file,
                                     std::vector<std::string>* files) {
  files->push_back(path);
  std::ofstream out(DraftOf(path), std::ios::binary | std::ios::trunc);
  out.write(file.data(), static_cast<std::streamsize>(file.size()));
  out.close();
  return out ? absl::OkStatus() : NotSaved(path);
}

absl::StatusOr<std::vector<uint8_t>> StoreWorker::GetState(size_t slice) {
  uint64_t request = 0;
  {
    const absl::MutexLock lock(&mu_);
    request = ++last_request_;
  }
  const StoreHead head{
      .kind = Kind::kGet, .slice = static_cast<uint32_t>(slice), .request = request};
  if (absl::Status bad = SendTo(ServerOf(slice), kLast, head, {}); !bad.ok()) return bad;
  const absl::Status waited = Await(
      [&] {
        mu_.AssertHeld();
        return states_.contains(request);
      },
      [&] { return absl::StrCat("server ", ServerOf(slice), " did not send its state"); });
  if (!waited.ok()) return waited;
  const absl::MutexLock lock(&mu_);
  return std::move(states_.extract(request).mapped());
}

absl::StatusOr<std::string> StoreWorker::StatesAsFile() {
  StateFileWriter file(layout_.slices().size());
  for (size_t i = 0; i < layout_.slices().size(); ++i) {
    const StoreSlice& slice = layout_.slices()[i];
    const absl::StatusOr<std::vector<uint8_t>> state = GetState(i);
    if (!state.ok()) return state.status();
    file.Add(layout_.keys()[slice.key].name, slice.offset, slice.count, *state);
  }
  return std::move(file).Finish();
}

// A digest of the first slice's state: the same on all workers, different after an update.
absl::StatusOr<uint64_t> StoreWorker::SaveNumber() {
  if (layout_.slices().empty()) return 0;
  const absl::StatusOr<std::vector<uint8_t>> state = GetState(0);
  if (!state.ok()) return state.status();
  return DigestBytes(*state);
}

std::string StoreWorker::ResidualsAsFile(uint64_t save) const {
  const absl::MutexLock lock(&mu_);
  StateFileWriter file(1 + keys_.size());
  ByteWriter head;
  head.Number(save);
  file.Add(kPartHead, 0, static_cast<uint64_t>(options_.workers), std::move(head).Finish());
  for (size_t i = 0; i < keys_.size(); ++i) {
    const size_t numel = keys_[i].residual == nullptr ? 0 : layout_.keys()[i].numel;
    file.Add(layout_.keys()[i].name, 0, numel,
             {reinterpret_cast<const uint8_t*>(keys_[i].residual.get()), numel * sizeof(float)});
  }
  return std::move(file).Finish();
}

absl::Status StoreWorker::Load(const std::string& path) {
  if (CatchesUp(Together::kLoad)) {  // the store has been updated since that load
    ++calls_made_[Together::kLoad];
    return absl::OkStatus();
  }
  absl::StatusOr<Part> part = ReadPart(path);
  absl::Status bad = part.status();
  if (rank_ == 0 && bad.ok()) {
    const absl::StatusOr<std::string> file = ReadFile(path);
    bad = file.ok() ? PutStates(*file, &*part) : file.status();
    if (!bad.ok()) bad = absl::Status(bad.code(), absl::StrCat("'", path, "': ", bad.message()));
  }
  // Servers compare the workers' saves, and send a complaint to all workers.
  const std::string body =
      !bad.ok() ? absl::StrCat(std::string(kComplaint), bad.message())
                : (part->save.has_value() ? absl::StrCat("save ", *part->save) : std::string());
  const absl::Status loaded =
      CallAll(Together::kLoad, std::vector<std::string>(resenders_.size(), body));
  if (!loaded.ok()) return loaded;
  const absl::MutexLock lock(&mu_);
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i].residual == nullptr) continue;
    const std::vector<float>& saved = part->residuals[i];
    std::fill_n(keys_[i].residual.get(), layout_.keys()[i].numel, 0.0f);
    std::copy(saved.begin(), saved.end(), keys_[i].residual.get());
  }
  return absl::OkStatus();
}

// A worker that did not exist at the time of the save has no file, and begins without residuals.
absl::StatusOr<StoreWorker::Part> StoreWorker::ReadPart(const std::string& path) const {
  Part part{.save = {}, .residuals = std::vector<std::vector<float>>(layout_.keys().size())};
  const auto has_residual = [](const StoreKey& key) { return key.has_residual(); };
  if (std::ranges::none_of(layout_.keys(), has_residual)) return part;
  std::string name = PartOf(path, rank_);
  absl::StatusOr<std::string> file = ReadFile(name);
  const bool is_missing = !file.ok();
  if (is_missing && rank_ > 0) {
    name = PartOf(path, 0);
    file = ReadFile(name);
  }
  const auto wrong = [&](std::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': this worker's file '", name, "': ", std::string(why)));
  };
  const auto missing = [&] {
    name = PartOf(path, rank_);
    return wrong("it can't be read; each worker needs its own file there");
  };
  if (!file.ok()) return missing();
  const absl::StatusOr<SliceStates> states = ReadStateFile(*file);
  if (!states.ok()) return wrong(std::string(states.status().message()));
  const auto head = states->find({kPartHead, 0});
  if (head == states->end()) return wrong("it has no worker's residuals");
  if (is_missing) {
    if (static_cast<uint64_t>(rank_) < head->second.elements) return missing();
    return part;
  }
  part.save = ByteReader(head->second.state).Number();
  for (size_t i = 0; i < layout_.keys().size(); ++i) {
    const StoreKey& key = layout_.keys()[i];
    const auto found = states->find({key.name, 0});
    const uint64_t elements = found == states->end() ? key.numel : found->second.elements;
    if (found == states->end() || (elements != 0 && elements != key.numel) ||
        found->second.state.size() != elements * sizeof(float)) {
      return wrong(absl::StrCat("it has no residual of key '", key.name, "' with ", key.numel,
                                " elements; load it with the keys and sizes it was saved with"));
    }
    part.residuals[i].resize(elements);
    if (elements != 0) {
      std::memcpy(part.residuals[i].data(), found->second.state.data(), elements * sizeof(float));
    }
  }
  return part;
}

absl::Status StoreWorker::PutStates(const std::string& file, Part* part) {
  const absl::StatusOr<SliceStates> states = ReadStateFile(file);
  if (!states.ok()) return states.status();
  for (size_t i = 0; i < layout_.slices().size(); ++i) {
    const StoreSlice& slice = layout_.slices()[i];
    const std::string& key = layout_.keys()[slice.key].name;
    const auto found = states->find({key, slice.offset});
    if (found == states->end() || found->second.elements != slice.count) {
      return absl::InvalidArgumentError(absl::StrCat(
          "it has no elements ", slice.offset, " to ", slice.offset + slice.count, " of key '", key,
          "'; load it with the keys, sizes, codec and slices that it was saved with"));
    }
    if (i == 0) {
      const uint64_t save = DigestBytes(found->second.state);
      if (part->save.value_or(save) != save) {
        return absl::InvalidArgumentError(absl::StrCat(
            "it is of save ", save, ", but worker 0's residuals are of save ", *part->save));
      }
      part->save = save;
    }
    const absl::Status bad =
        SendTo(ServerOf(i), kLast, {.kind = Kind::kPut, .slice = static_cast<uint32_t>(i)},
               {found->second.state.begin(), found->second.state.end()});
    if (!bad.ok()) return bad;
  }
  return absl::OkStatus();
}

}  // namespace thinwire
