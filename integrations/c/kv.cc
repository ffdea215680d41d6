// tw_kv_*: the store.
#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "integrations/c/border.h"
#include "integrations/c/options.h"
#include "schedule/store_host/join_store.h"
#include "schedule/store_host/journal.h"
#include "schedule/store_host/serve.h"
#include "schedule/store_host/worker.h"
#include "transport/messages/zmq/zmq_library.h"

using thinwire::StoreWorker;
using thinwire::TextOf;
using thinwire::ToC;

struct tw_kv {
  std::unique_ptr<StoreWorker> worker;
  const pid_t home = getpid();
};

namespace thinwire {
namespace {

constexpr size_t kSliceStep = 4096;  // a block of every codec begins at each multiple of it

absl::StatusOr<StorePlace> PlaceOf(const tw_kv_options& in) {
  if (in.timeout_ms < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout_ms is ", in.timeout_ms, ", expected 0 or more"));
  }
  StorePlace place{.rank = in.rank,
                   .workers = in.workers,
                   .servers = in.servers,
                   .store = nullptr,
                   .local_group = std::string(TextOf(in.local_group)),
                   .group = std::string(TextOf(in.group)),
                   .key_file = std::string(TextOf(in.key_file)),
                   .interface = std::string(TextOf(in.interface_name)),
                   .rendezvous_host = std::string(TextOf(in.rendezvous_host)),
                   .zmq_library = std::string(TextOf(in.zmq_library))};
  if (in.timeout_ms > 0) place.timeout = std::chrono::milliseconds(in.timeout_ms);
  if (in.store.set != nullptr && in.store.get != nullptr) {
    place.store = MakeCallbackStore(in.store);
    place.local_group.clear();
  } else if (place.local_group.empty() && in.store_path != nullptr) {
    place.store = MakeFileStore(in.store_path);
  }
  return place;
}

absl::StatusOr<StoreWorker::Options> WorkerOptionsOf(const tw_kv_options& in,
                                                     const StorePlace& place) {
  const std::string_view mode_text = TextOf(in.mode), codec_text = TextOf(in.codec);
  const absl::StatusOr<StoreMode> mode = StoreMode::Parse(mode_text.empty() ? "sync" : mode_text);
  if (!mode.ok()) return mode.status();
  const absl::StatusOr<CodecPair> codec =
      CodecPair::Parse(codec_text.empty() ? "fp32" : codec_text);
  if (!codec.ok()) return codec.status();
  StoreWorker::Options out{.workers = place.workers, .mode = *mode, .codec = *codec, .layout = {}};
  out.timeout = place.timeout;
  out.layout.servers = place.servers;
  out.layout.bigarray_bound = in.bigarray_bound;
  out.layout.slice_elements = in.slice_elements;
  if (in.slice_elements % kSliceStep != 0) {
    return absl::InvalidArgumentError(absl::StrCat("slice_elements is ", in.slice_elements,
                                                   ", expected a multiple of ", kSliceStep));
  }
  return out;
}

absl::StatusOr<std::unique_ptr<tw_kv>> MakeKv(const tw_kv_options& in) {
  const absl::StatusOr<StorePlace> place = PlaceOf(in);
  if (!place.ok()) return place.status();
  const absl::StatusOr<StoreWorker::Options> options = WorkerOptionsOf(in, *place);
  if (!options.ok()) return options.status();
  if (place->is_server()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", in.rank, " of a store with ",
                                                   in.workers,
                                                   " workers is a server; call tw_kv_serve"));
  }
  absl::StatusOr<StoreMembership> joined = JoinStore(*place);
  if (!joined.ok()) return joined.status();
  absl::StatusOr<std::unique_ptr<StoreWorker>> worker =
      StoreWorker::Create(std::move(joined->plane), *options);
  if (!worker.ok()) return worker.status();
  auto kv = std::make_unique<tw_kv>();
  kv->worker = *std::move(worker);
  return kv;
}

absl::Status ServeStore(const tw_kv_options& in) {
  absl::StatusOr<StorePlace> place = PlaceOf(in);
  if (!place.ok()) return place.status();
  if (!place->is_server()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", in.rank, " of a store with ",
                                                   in.workers, " workers is a worker; call ",
                                                   "tw_kv_create"));
  }
  const int server = place->rank - place->workers;
  absl::StatusOr<std::unique_ptr<Journal>> opened = nullptr;
  if (const std::string_view text = TextOf(in.journal); !text.empty()) {
    const absl::StatusOr<JournalSpec> spec = JournalSpec::Parse(text);
    opened = spec.ok() ? Journal::Open(*spec, server) : spec.status();
    place->has_journal = true;
    place->journal_failure = opened.status();
    if (opened.ok() && (*opened)->former().has_value()) {
      place->former_run = (*opened)->former()->id;
      place->former_port = (*opened)->former()->port;
    }
  }
  const StoreServer::Options options{.server = server,
                                     .workers = place->workers,
                                     .servers = place->servers,
                                     .timeout = place->timeout};
  const absl::StatusOr<StoreMembership> joined = JoinStore(*place);
  if (!joined.ok()) {
    const bool has_place = place->store != nullptr || !place->local_group.empty();
    Journal* const found = opened.ok() ? opened->get() : nullptr;
    if (has_place || found == nullptr) return joined.status();
    const bool is_over = IsOver(*found, options);
    if (is_over || !found->former().has_value()) found->Remove();  // Open may have created it
    return is_over ? absl::OkStatus() : joined.status();
  }
  absl::StatusOr<Journal*> journal = nullptr;
  if (!joined->failure.ok()) {
    journal = joined->failure;
  } else if (*opened != nullptr) {
    const absl::Status begun = (*opened)->Begin({.id = joined->run,
                                                 .server = server,
                                                 .servers = place->servers,
                                                 .workers = place->workers,
                                                 .port = joined->port});
    if (begun.ok()) {
      journal = opened->get();
    } else {
      journal = begun;
    }
  }
  return Serve(*joined->plane, options, journal);
}

absl::Status CheckKv(const char* function, const tw_kv* kv,
                     std::initializer_list<const void*> pointers = {}) {
  bool null = kv == nullptr;
  for (const void* const pointer : pointers) null = null || pointer == nullptr;
  if (null) return absl::InvalidArgumentError(absl::StrCat(function, " got a null pointer"));
  return thinwire::CheckHome(kv->home, "store");
}

absl::Status CheckTensor(const char* function, const tw_kv* kv, const char* key, const void* data,
                         size_t count, tw_dtype dtype) {
  if (absl::Status bad = CheckKv(function, kv, {key, data}); !bad.ok()) return bad;
  std::string wrong(CheckElements(count).message());
  if (dtype != TW_F32 && dtype != TW_BF16 && dtype != TW_F16) {
    wrong =
        absl::StrCat("dtype is ", static_cast<int>(dtype), ", expected TW_F32, TW_BF16 or TW_F16");
  }
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(function, ", key '", key, "': ", wrong));
}

// With row_count 0, `rows` and `data` may be null.
absl::Status CheckRows(const char* function, const tw_kv* kv, const char* key, const int64_t* rows,
                       size_t row_count, const void* data, size_t count, tw_dtype dtype) {
  const char none = 0;
  if (row_count == 0) return CheckTensor(function, kv, key, &none, count, dtype);
  if (absl::Status bad = CheckKv(function, kv, {rows}); !bad.ok()) return bad;
  return CheckTensor(function, kv, key, data, std::max(count, row_count), dtype);
}

}  // namespace
}  // namespace thinwire

using thinwire::CheckKv;
using thinwire::CheckRows;
using thinwire::CheckTensor;
using thinwire::ViewOf;

extern "C" {

void tw_kv_options_init_sized(tw_kv_options* options, size_t struct_size) {
  if (options == nullptr) return;
  std::memset(options, 0, struct_size);
  if (struct_size < sizeof(tw_kv_options)) return;  // ReadKvOptions refuses struct_size 0
  options->struct_size = struct_size;
  options->workers = options->servers = 1;
}

tw_status tw_zmq_version(const char* library, char* text, size_t capacity) {
  if (text == nullptr) return ToC(absl::InvalidArgumentError("the place for the version is null"));
  const auto zmq = thinwire::LoadZmq(std::string(TextOf(library)));
  if (!zmq.ok()) return ToC(zmq.status());
  return ToC(thinwire::WriteText("the version", (*zmq)->version, text, capacity));
}

tw_status tw_kv_serve(const tw_kv_options* options) {
  const absl::StatusOr<tw_kv_options> read = thinwire::ReadKvOptions(options);
  return ToC(read.ok() ? thinwire::ServeStore(*read) : read.status());
}

tw_status tw_kv_create(const tw_kv_options* options, tw_kv** kv) {
  if (kv == nullptr) return ToC(absl::InvalidArgumentError("tw_kv_create got a null pointer"));
  *kv = nullptr;
  const absl::StatusOr<tw_kv_options> read = thinwire::ReadKvOptions(options);
  if (!read.ok()) return ToC(read.status());
  absl::StatusOr<std::unique_ptr<tw_kv>> made = thinwire::MakeKv(*read);
  if (made.ok()) *kv = made->release();
  return ToC(made.status());
}

void tw_kv_destroy(tw_kv* kv) {
  if (kv == nullptr || !thinwire::IsHome(kv->home)) return;
  delete kv;
}

tw_status tw_kv_set_codec(tw_kv* kv, const char* codec) {
  if (absl::Status bad = CheckKv("tw_kv_set_codec", kv, {codec}); !bad.ok()) return ToC(bad);
  const absl::StatusOr<thinwire::CodecPair> pair = thinwire::CodecPair::Parse(codec);
  return ToC(pair.ok() ? kv->worker->SetCodec(*pair) : pair.status());
}

tw_status tw_kv_init(tw_kv* kv, const tw_kv_tensor* tensors, size_t count) {
  if (absl::Status bad = CheckKv("tw_kv_init", kv, {tensors}); !bad.ok()) return ToC(bad);
  if (absl::Status bad = thinwire::CheckItems("tensors", count); !bad.ok()) return ToC(bad);
  std::vector<StoreWorker::Value> values;
  for (size_t i = 0; i < count; ++i) {
    const tw_kv_tensor& tensor = tensors[i];
    const void* const data = tensor.count == 0 ? &tensor : tensor.values;  // Init refuses these
    const absl::Status bad =
        CheckTensor("tw_kv_init", kv, tensor.key, data, tensor.count, tensor.dtype);
    if (!bad.ok()) return ToC(bad);
    values.push_back({tensor.key, ViewOf(tensor.values, tensor.count, tensor.dtype), tensor.width});
  }
  return ToC(kv->worker->Init(values));
}

tw_status tw_kv_push(tw_kv* kv, const char* key, const void* send, size_t count, tw_dtype dtype,
                     int priority, double weight) {
  if (absl::Status bad = CheckTensor("tw_kv_push", kv, key, send, count, dtype); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(kv->worker->Push(key, ViewOf(send, count, dtype), priority, weight));
}

tw_status tw_kv_pull(tw_kv* kv, const char* key, void* recv, size_t count, tw_dtype dtype,
                     int priority) {
  if (absl::Status bad = CheckTensor("tw_kv_pull", kv, key, recv, count, dtype); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(kv->worker->Pull(key, ViewOf(recv, count, dtype), priority));
}

tw_status tw_kv_push_pull(tw_kv* kv, const char* key, const void* send, void* recv, size_t count,
                          tw_dtype dtype, int priority, double weight) {
  absl::Status bad = CheckTensor("tw_kv_push_pull", kv, key, send, count, dtype);
  if (bad.ok()) bad = CheckTensor("tw_kv_push_pull", kv, key, recv, count, dtype);
  if (!bad.ok()) return ToC(bad);
  return ToC(kv->worker->PushPull(key, ViewOf(send, count, dtype), ViewOf(recv, count, dtype),
                                  priority, weight));
}

tw_status tw_kv_push_rows(tw_kv* kv, const char* key, const int64_t* rows, size_t row_count,
                          const void* send, size_t count, tw_dtype dtype, int priority,
                          double weight) {
  const absl::Status bad =
      CheckRows("tw_kv_push_rows", kv, key, rows, row_count, send, count, dtype);
  if (!bad.ok()) return ToC(bad);
  return ToC(
      kv->worker->PushRows(key, {rows, row_count}, ViewOf(send, count, dtype), priority, weight));
}

tw_status tw_kv_pull_rows(tw_kv* kv, const char* key, const int64_t* rows, size_t row_count,
                          void* recv, size_t count, tw_dtype dtype, int priority) {
  const absl::Status bad =
      CheckRows("tw_kv_pull_rows", kv, key, rows, row_count, recv, count, dtype);
  if (!bad.ok()) return ToC(bad);
  return ToC(kv->worker->PullRows(key, {rows, row_count}, ViewOf(recv, count, dtype), priority));
}

tw_status tw_kv_push_pull_rows(tw_kv* kv, const char* key, const int64_t* push_rows,
                               size_t push_row_count, const void* send, size_t send_count,
                               const int64_t* pull_rows, size_t pull_row_count, void* recv,
                               size_t recv_count, tw_dtype dtype, int priority, double weight) {
  const char* const name = "tw_kv_push_pull_rows";
  absl::Status bad = CheckRows(name, kv, key, push_rows, push_row_count, send, send_count, dtype);
  if (bad.ok()) bad = CheckRows(name, kv, key, pull_rows, pull_row_count, recv, recv_count, dtype);
  if (!bad.ok()) return ToC(bad);
  return ToC(kv->worker->PushPullRows(
      key, {{push_rows, push_row_count}, ViewOf(send, send_count, dtype)},
      {{pull_rows, pull_row_count}, ViewOf(recv, recv_count, dtype)}, priority, weight));
}

tw_status tw_kv_wait(tw_kv* kv, const char* key) {
  if (absl::Status bad = CheckKv("tw_kv_wait", kv); !bad.ok()) return ToC(bad);
  return ToC(key == nullptr ? kv->worker->WaitAll() : kv->worker->Wait(key));
}

tw_status tw_kv_set_optimizer(tw_kv* kv, const char* spec) {
  if (absl::Status bad = CheckKv("tw_kv_set_optimizer", kv, {spec}); !bad.ok()) return ToC(bad);
  return ToC(kv->worker->SetOptimizer(spec));
}

tw_status tw_kv_barrier(tw_kv* kv) {
  if (absl::Status bad = CheckKv("tw_kv_barrier", kv); !bad.ok()) return ToC(bad);
  return ToC(kv->worker->Barrier());
}

tw_status tw_kv_save(tw_kv* kv, const char* path) {
  if (absl::Status bad = CheckKv("tw_kv_save", kv, {path}); !bad.ok()) return ToC(bad);
  return ToC(kv->worker->Save(path));
}

tw_status tw_kv_load(tw_kv* kv, const char* path) {
  if (absl::Status bad = CheckKv("tw_kv_load", kv, {path}); !bad.ok()) return ToC(bad);
  return ToC(kv->worker->Load(path));
}

tw_status tw_kv_describe(tw_kv* kv, char* text, size_t capacity, size_t* bytes) {
  const void* const room = capacity == 0 ? bytes : static_cast<const void*>(text);
  if (absl::Status bad = CheckKv("tw_kv_describe", kv, {bytes, room}); !bad.ok()) return ToC(bad);
  const std::string all = kv->worker->Describe();
  *bytes = all.size() + 1;
  if (capacity > 0) text[all.copy(text, capacity - 1)] = '\0';
  return TW_OK;
}

tw_status tw_kv_take(tw_kv* kv, uint32_t share, uint64_t samples, uint64_t batch, uint64_t epochs,
                     uint64_t applied, tw_kv_work* work) {
  if (absl::Status bad = CheckKv("tw_kv_take", kv, {work}); !bad.ok()) return ToC(bad);
  const absl::StatusOr<StoreWorker::Work> taken =
      kv->worker->Take(share, {.samples = samples, .batch = batch, .epochs = epochs}, applied);
  if (!taken.ok()) return ToC(taken.status());
  *work = {taken->range.epoch, taken->range.first, taken->range.count, taken->waited ? 1 : 0};
  return TW_OK;
}

tw_status tw_kv_has_joined(tw_kv* kv, int* joined) {
  if (absl::Status bad = CheckKv("tw_kv_has_joined", kv, {joined}); !bad.ok()) return ToC(bad);
  *joined = kv->worker->has_joined() ? 1 : 0;
  return TW_OK;
}

tw_status tw_kv_bytes_sent(tw_kv* kv, uint64_t* bytes) {
  if (absl::Status bad = CheckKv("tw_kv_bytes_sent", kv, {bytes}); !bad.ok()) return ToC(bad);
  *bytes = kv->worker->bytes_sent();
  return TW_OK;
}

}  // extern "C"
