// tw_bucket_*: a tensor that is described once and submitted in every step. tw_comm_end_step.
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/border.h"

struct tw_bucket {
  tw_comm* comm = nullptr;
  std::shared_ptr<const thinwire::Bucket> bucket;
  tw_bucket_info info{};
  thinwire::UsePtr work;  // the use that was started and not waited for yet, or null
  const pid_t home = getpid();
};

namespace {

using thinwire::Collective;
using thinwire::ToC;

absl::Status CheckInfo(const tw_comm* comm, const tw_bucket_info& info) {
  if (info.struct_size != sizeof(tw_bucket_info)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tw_bucket_info has ", info.struct_size, " bytes, expected ", sizeof(tw_bucket_info),
        "; set struct_size, and compile against this ", "library's header"));
  }
  if (info.num_segments > 0 && info.segments == nullptr) {
    return absl::InvalidArgumentError("the segments are null");
  }
  if (absl::Status bad = thinwire::CheckItems("segments", info.num_segments); !bad.ok()) return bad;
  if (info.collective < TW_ALL_REDUCE || info.collective > TW_ALL_TO_ALL) {
    return absl::InvalidArgumentError(
        absl::StrCat("collective ", static_cast<int>(info.collective),
                     " is unknown, expected TW_ALL_REDUCE, TW_REDUCE_SCATTER, TW_ALL_GATHER or ",
                     "TW_ALL_TO_ALL"));
  }
  return thinwire::CheckCall(comm, info.dtype, info.op, nullptr);
}

size_t OutputCount(const tw_bucket& bucket) {
  const size_t size = bucket.comm->size;
  switch (bucket.info.collective) {
    case TW_REDUCE_SCATTER: return bucket.info.count / size;
    case TW_ALL_GATHER: return bucket.info.count * size;
    default: return bucket.info.count;
  }
}

absl::Status Start(tw_bucket& bucket, const void* send, void* recv, void* stream,
                   std::span<const uint32_t> absent, float divisor) {
  const tw_bucket_info& info = bucket.info;
  if (bucket.work != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", bucket.comm->rank, ", tensor '", bucket.bucket->key(),
                     "' was started and not waited for; call tw_bucket_wait first"));
  }
  if (absl::Status bad = thinwire::CheckCall(bucket.comm, info.dtype, info.op, stream); !bad.ok()) {
    return bad;
  }
  absl::StatusOr<thinwire::UsePtr> work = bucket.comm->engine->Submit(
      bucket.bucket, {.input = thinwire::ViewOf(send, info.count, info.dtype),
                      .output = thinwire::ViewOf(recv, OutputCount(bucket), info.dtype),
                      .absent = absent,
                      .stream = stream,
                      .divisor = divisor});
  if (work.ok()) bucket.work = *std::move(work);
  return work.status();
}

template <typename Wait>
tw_status WaitFor(tw_bucket* bucket, Wait wait) {
  if (bucket == nullptr) return ToC(absl::InvalidArgumentError("the bucket is null"));
  if (absl::Status bad = thinwire::CheckHome(bucket->home); !bad.ok()) return ToC(bad);
  if (bucket->work == nullptr) {
    return ToC(absl::InvalidArgumentError("the bucket was not started; call tw_bucket_start"));
  }
  const thinwire::UsePtr work = std::move(bucket->work);
  return ToC(wait(*work));
}

}  // namespace

extern "C" {

tw_status tw_bucket_create(tw_comm* comm, const tw_bucket_info* info, tw_bucket** bucket) {
  if (info == nullptr || bucket == nullptr) {
    return ToC(absl::InvalidArgumentError("tw_bucket_create got a null pointer"));
  }
  *bucket = nullptr;
  if (absl::Status bad = CheckInfo(comm, *info); !bad.ok()) return ToC(bad);
  const thinwire::CallSegments parts = thinwire::SegmentsOf(info->segments, info->num_segments);
  absl::StatusOr<std::shared_ptr<const thinwire::Bucket>> registered =
      comm->engine->Register({.key = thinwire::TextOf(info->name),
                              .numel = info->count,
                              .dtype = static_cast<thinwire::DType>(info->dtype),
                              .op = static_cast<thinwire::Op>(info->op),
                              .collective = static_cast<Collective>(info->collective),
                              .priority = info->priority,
                              .segments = parts.segments,
                              .shape = thinwire::TextOf(info->shape)});
  if (!registered.ok()) return ToC(registered.status());
  auto made = std::make_unique<tw_bucket>(tw_bucket{comm, *std::move(registered), *info, nullptr});
  // These pointers are to the caller's memory, which may go after this call.
  made->info.name = nullptr;
  made->info.segments = nullptr;
  made->info.shape = nullptr;
  *bucket = made.release();
  return TW_OK;
}

tw_status tw_bucket_start(tw_bucket* bucket, const void* send, void* recv, void* stream,
                          const uint32_t* absent, size_t num_absent) {
  return tw_bucket_start_divided(bucket, send, recv, stream, absent, num_absent, 0.0f);
}

tw_status tw_bucket_start_divided(tw_bucket* bucket, const void* send, void* recv, void* stream,
                                  const uint32_t* absent, size_t num_absent, float divisor) {
  if (bucket == nullptr) return ToC(absl::InvalidArgumentError("the bucket is null"));
  if (num_absent > 0 && absent == nullptr) {
    return ToC(absl::InvalidArgumentError("the numbers of absent segments are null"));
  }
  if (absl::Status bad = thinwire::CheckItems("absent segments", num_absent); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(Start(*bucket, send, recv, stream, {absent, num_absent}, divisor));
}

tw_status tw_bucket_wait(tw_bucket* bucket) {
  return WaitFor(bucket, [](thinwire::Use& work) { return work.Wait(); });
}

tw_status tw_bucket_wait_stream(tw_bucket* bucket, void* stream) {
  return WaitFor(bucket, [stream](thinwire::Use& work) { return work.WaitOn(stream); });
}

void tw_bucket_destroy(tw_bucket* bucket) {
  if (bucket != nullptr && thinwire::IsHome(bucket->home)) delete bucket;
}

tw_status tw_comm_end_step(tw_comm* comm) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_end_step", comm); !bad.ok()) return ToC(bad);
  comm->engine->EndStep();
  return TW_OK;
}

tw_status tw_comm_forget_step(tw_comm* comm) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_forget_step", comm); !bad.ok())
    return ToC(bad);
  comm->engine->ForgetStep();
  return TW_OK;
}

}  // extern "C"
