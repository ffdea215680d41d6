// Every call of the C interface with null pointers and impossible numbers returns a code and a
// message, and the communicator stays usable.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "integrations/c/thinwire.h"

namespace {

struct Case {
  const char* what;
  const char* words;  // in the message
  std::function<tw_status()> call;
};

void ExpectRefused(const std::vector<Case>& cases) {
  for (const Case& wrong : cases) {
    EXPECT_EQ(wrong.call(), TW_INVALID_ARGUMENT) << wrong.what;
    EXPECT_NE(std::string(tw_last_error()).find(wrong.words), std::string::npos)
        << wrong.what << ": " << tw_last_error();
  }
}

// A group of one rank.
class CArguments : public testing::Test {
 protected:
  void SetUp() override {
    tw_options_init(&options_);
    ASSERT_EQ(tw_comm_create(&options_, &comm_), TW_OK) << tw_last_error();
  }
  void TearDown() override {
    EXPECT_EQ(tw_all_reduce(x_, x_, 4, TW_F32, TW_SUM, comm_, nullptr), TW_OK) << tw_last_error();
    tw_comm_destroy(comm_);
  }

  tw_status ReduceSegment(const tw_segment& segment) {
    return tw_all_reduce_segments(x_, x_, 4, TW_F32, TW_SUM, comm_, nullptr, "g", 0, &segment, 1,
                                  &work_);
  }
  tw_status SetArray(const tw_residual_array& array) {
    return tw_residual_set_all(comm_, &array, 1);
  }
  tw_status CreateBucket(const std::function<void(tw_bucket_info*)>& change) {
    tw_bucket_info info{};
    info.struct_size = sizeof(info);
    info.count = 4;
    change(&info);
    return tw_bucket_create(comm_, &info, &bucket_);
  }
  tw_status Simulate(size_t numel, size_t num_layers) {
    const tw_layer layer{numel, 1.0, 1.0};
    tw_simulation in{};
    in.struct_size = sizeof(in);
    in.options = &options_;
    in.layers = &layer;
    in.num_layers = num_layers;
    in.bytes_per_s = 1e9;
    double step_s = 0;
    return tw_simulate(&in, &step_s, nullptr);
  }
  tw_status CreateComm(const std::function<void(tw_options*)>& change) {
    tw_options options = options_;
    change(&options);
    tw_comm* comm = nullptr;
    const tw_status status = tw_comm_create(&options, &comm);
    EXPECT_EQ(comm, nullptr);
    return status;
  }

  float x_[4] = {};
  uint8_t wire_[64] = {};
  char text_[64] = {};
  size_t size_ = 0;
  int number_ = 0;
  tw_options options_{};
  tw_comm* comm_ = nullptr;
  tw_work* work_ = nullptr;
  tw_bucket* bucket_ = nullptr;
};

TEST_F(CArguments, NullPointersAreRefused) {
  tw_stats stats;
  tw_nodes nodes;
  double seconds;
  const auto all_reduce = [&](const void* send, void* recv) {
    return tw_all_reduce(send, recv, 4, TW_F32, TW_SUM, comm_, nullptr);
  };
  const auto segments = [&](const tw_segment* of, tw_work** work) {
    return tw_all_reduce_segments(x_, x_, 4, TW_F32, TW_SUM, comm_, nullptr, "g", 0, of, 1, work);
  };
  const tw_segment segment{"g", 0, 4, 4, 0, 0};
  ExpectRefused({
      {"create", "null", [&] { return tw_comm_create(&options_, nullptr); }},
      {"abort", "null", [] { return tw_comm_abort(nullptr); }},
      {"fail", "null", [&] { return tw_comm_fail(comm_, TW_INTERNAL, nullptr); }},
      {"send", "null", [&] { return all_reduce(nullptr, x_); }},
      {"recv", "null", [&] { return all_reduce(x_, nullptr); }},
      {"scatter", "null",
       [&] { return tw_reduce_scatter(x_, x_, 4, TW_F32, TW_SUM, nullptr, nullptr); }},
      {"gather", "null", [&] { return tw_all_gather(nullptr, x_, 4, TW_F32, comm_, nullptr); }},
      {"segments", "null", [&] { return segments(nullptr, &work_); }},
      {"work's place", "null", [&] { return segments(&segment, nullptr); }},
      {"work", "null", [] { return tw_wait(nullptr); }},
      {"work and stream", "null", [] { return tw_wait_stream(nullptr, nullptr); }},
      {"info", "null", [&] { return tw_bucket_create(comm_, nullptr, &bucket_); }},
      {"bucket's comm", "null",
       [&] {
         tw_bucket_info info{};
         info.struct_size = sizeof(info);
         return tw_bucket_create(nullptr, &info, &bucket_);
       }},
      {"bucket's segments", "null",
       [&] { return CreateBucket([](auto* i) { i->num_segments = 1; }); }},
      {"bucket", "null", [&] { return tw_bucket_start(nullptr, x_, x_, nullptr, nullptr, 0); }},
      {"divided bucket", "null",
       [&] { return tw_bucket_start_divided(nullptr, x_, x_, nullptr, nullptr, 0, 2); }},
      {"bucket's wait", "null", [] { return tw_bucket_wait(nullptr); }},
      {"bucket's wait on a stream", "null", [] { return tw_bucket_wait_stream(nullptr, nullptr); }},
      {"description", "null", [&] { return tw_comm_describe(comm_, text_, 64, nullptr); }},
      {"description's text", "null", [&] { return tw_comm_describe(comm_, nullptr, 64, &size_); }},
      {"transport", "null", [&] { return tw_comm_transport(comm_, nullptr, 64); }},
      {"matching", "null", [&] { return tw_comm_matches_by_order(comm_, nullptr); }},
      {"topology", "null", [&] { return tw_comm_topology(comm_, nullptr, 64); }},
      {"nodes", "null", [&] { return tw_comm_nodes(nullptr, &nodes); }},
      {"stats", "null", [&] { return tw_comm_stats(nullptr, &stats); }},
      {"codec", "null", [&] { return tw_comm_codec(comm_, 0, nullptr, 64); }},
      {"raw", "null", [&] { return tw_comm_goes_raw(comm_, 4, TW_F32, nullptr); }},
      {"step", "null", [] { return tw_comm_set_step(nullptr, 1); }},
      {"end of step", "null", [] { return tw_comm_end_step(nullptr); }},
      {"forgotten step", "null", [] { return tw_comm_forget_step(nullptr); }},
      {"residuals", "null", [&] { return tw_residual_count(comm_, nullptr); }},
      {"residual's name", "null", [&] { return tw_residual_info(comm_, 0, nullptr, 64, &size_); }},
      {"residual", "null", [&] { return tw_residual_get(comm_, "g", nullptr, x_, nullptr, 4); }},
      {"new residual", "null", [&] { return tw_residual_set(comm_, nullptr, x_, x_, nullptr, 4); }},
      {"residuals' arrays", "null", [&] { return tw_residual_get_all(comm_, nullptr, 1); }},
      {"new arrays", "null", [&] { return tw_residual_set_all(comm_, nullptr, 1); }},
      {"an array's values", "null",
       [&] {
         return SetArray({"g", "first", nullptr, 4});
       }},
      {"an array's parameter", "null",
       [&] {
         return SetArray({nullptr, "first", x_, 4});
       }},
      {"undo", "null", [] { return tw_residual_undo(nullptr); }},
      {"encode", "null", [&] { return tw_encode("int4", x_, 4, nullptr, nullptr, 64, &size_); }},
      {"decode", "null", [&] { return tw_decode("int4", nullptr, 32, x_, 4); }},
      {"size", "null", [] { return tw_encoded_bytes("int4", 4, nullptr); }},
      {"mean", "null",
       [&] { return tw_decode_mean("int4", nullptr, 32, x_, 1, 4, x_, 4, &seconds); }},
      {"a member's mean", "null",
       [&] {
         const void* none = nullptr;
         return tw_decode_mean("int4", &none, 32, x_, 1, 4, x_, 4, &seconds);
       }},
      {"simulate", "null", [&] { return tw_simulate(nullptr, &seconds, nullptr); }},
      {"devices", "null", [] { return tw_cuda_device_count(nullptr, nullptr); }},
  });
}

TEST_F(CArguments, NumbersThatCantBeAreRefused) {
  double seconds = 0;
  constexpr size_t kMax = SIZE_MAX;
  constexpr size_t kWraps = kMax / 4 + 1;  // times 4 it wraps to 0
  const auto reduce = [&](size_t count) {
    return tw_all_reduce(x_, x_, count, TW_F32, TW_SUM, comm_, nullptr);
  };
  const auto segment = [&](size_t offset, size_t count, size_t total, size_t codec) {
    return ReduceSegment({"g", offset, count, total, codec, 0});
  };
  ExpectRefused({
      {"count", "elements", [&] { return reduce(kMax); }},
      {"count of no bytes", "elements", [&] { return reduce(kWraps); }},
      {"count beyond any memory", "elements", [&] { return reduce(size_t{1} << 40); }},
      {"scatter", "elements",
       [&] { return tw_reduce_scatter(x_, x_, kMax, TW_F32, TW_SUM, comm_, nullptr); }},
      {"gather", "elements", [&] { return tw_all_gather(x_, x_, kMax, TW_F32, comm_, nullptr); }},
      {"bucket", "elements", [&] { return CreateBucket([](auto* i) { i->count = kWraps; }); }},
      {"segment's end", "of 4", [&] { return segment(1, 4, 4, 0); }},
      {"segment's offset", "of 4", [&] { return segment(kMax - 3, 4, 4, 0); }},
      {"segment's total", "elements", [&] { return segment(0, 4, kMax, 0); }},
      {"segment's codec", "codec", [&] { return segment(0, 4, 4, size_t{1} << 32); }},
      {"bucket's op", "op 9",
       [&] { return CreateBucket([](auto* i) { i->op = static_cast<tw_op>(9); }); }},
      {"collective", "collective 9",
       [&] {
         return CreateBucket([](auto* i) { i->collective = static_cast<tw_collective>(9); });
       }},
      {"bucket's struct", "bytes",
       [&] { return CreateBucket([](auto* i) { i->struct_size = 8; }); }},
      {"dtype", "dtype 7",
       [&] { return tw_comm_goes_raw(comm_, 4, static_cast<tw_dtype>(7), &number_); }},
      {"codec's number", "codec 1", [&] { return tw_comm_codec(comm_, 1, text_, 64); }},
      {"residual's number", "residual 0",
       [&] { return tw_residual_info(comm_, 0, text_, 64, &size_); }},
      {"a residual beyond any memory", "elements",
       [&] { return tw_residual_set(comm_, "g", x_, x_, nullptr, size_t{1} << 40); }},
      {"residual's size", "elements",
       [&] { return tw_residual_set(comm_, "g", x_, x_, nullptr, kWraps); }},
      {"an array's size", "elements",
       [&] {
         return SetArray({"g", "first", x_, kWraps});
       }},
      {"room", "bytes", [&] { return tw_comm_transport(comm_, text_, 2); }},
      {"status", "TW_OK", [&] { return tw_comm_fail(comm_, TW_OK, "no reason"); }},
      {"encode", "elements",
       [&] { return tw_encode("fp32", x_, kWraps, nullptr, wire_, 0, &size_); }},
      {"decode", "elements", [&] { return tw_decode("fp32", wire_, 0, x_, kWraps); }},
      {"mean", "elements",
       [&] {
         const void* in = wire_;
         return tw_decode_mean("fp32", &in, 0, x_, 1, 4, x_, kWraps, &seconds);
       }},
      {"mean of nobody", "0 members",
       [&] {
         const void* in = wire_;
         return tw_decode_mean("fp32", &in, 16, x_, 0, 4, x_, 4, &seconds);
       }},
      {"mean's bytes", "16 bytes",
       [&] {
         const void* in = wire_;
         return tw_decode_mean("fp32", &in, 12, x_, 1, kMax, x_, 4, &seconds);
       }},
      {"encoded size", "elements", [&] { return tw_encoded_bytes("topk", kMax, &size_); }},
      {"tensor that may go raw", "elements",
       [&] { return tw_comm_goes_raw(comm_, kMax, TW_F32, &number_); }},
      {"number of segments", "segments",
       [&] {
         const tw_segment of{"g", 0, 4, 4, 0, 0};
         return tw_all_reduce_segments(x_, x_, 4, TW_F32, TW_SUM, comm_, nullptr, "g", 0, &of,
                                       size_t{1} << 40, &work_);
       }},
      {"number of a bucket's segments", "segments",
       [&] {
         return CreateBucket([](auto* i) {
           static const tw_segment of{"g", 0, 4, 4, 0, 0};
           i->segments = &of;
           i->num_segments = SIZE_MAX;
         });
       }},
      {"number of absent segments", "absent",
       [&] {
         const uint32_t absent = 0;
         EXPECT_EQ(CreateBucket([](auto*) {}), TW_OK) << tw_last_error();
         const tw_status status =
             tw_bucket_start(bucket_, x_, x_, nullptr, &absent, size_t{1} << 40);
         tw_bucket_destroy(bucket_);
         return status;
       }},
      {"number of arrays", "arrays",
       [&] {
         const tw_residual_array array{"g", "first", x_, 4};
         return tw_residual_set_all(comm_, &array, kMax);
       }},
      {"number of arrays to get", "arrays",
       [&] {
         const tw_residual_array array{"g", "first", x_, 4};
         return tw_residual_get_all(comm_, &array, size_t{1} << 40);
       }},
      {"number of members", "members",
       [&] {
         const void* in = wire_;
         return tw_decode_mean("fp32", &in, 16, x_, kMax, 4, x_, 4, &seconds);
       }},
      {"number of layers", "layers", [&] { return Simulate(4, kMax); }},
      {"a layer's size", "elements", [&] { return Simulate(kMax, 1); }},
      {"rank", "rank -1", [&] { return CreateComm([](auto* o) { o->rank = -1; }); }},
      {"size", "of 0", [&] { return CreateComm([](auto* o) { o->size = 0; }); }},
      {"timeout", "timeout -5", [&] { return CreateComm([](auto* o) { o->timeout_ms = -5; }); }},
      {"lanes", "lanes", [&] { return CreateComm([](auto* o) { o->lanes = -1; }); }},
      {"chunks", "chunk_bytes", [&] { return CreateComm([](auto* o) { o->chunk_bytes = 1; }); }},
      {"huge chunks", "chunk_bytes",
       [&] { return CreateComm([](auto* o) { o->chunk_bytes = SIZE_MAX; }); }},
      {"momentum", "momentum", [&] { return CreateComm([](auto* o) { o->momentum = 2; }); }},
      {"nowhere to meet", "meet", [&] { return CreateComm([](auto* o) { o->size = 2; }); }},
  });
}

// Results would overwrite half of the input before it is read.
TEST_F(CArguments, MemoryThatOverlapsIsRefused) {
  float *const begin = x_, *const next = x_ + 1;
  ExpectRefused({
      {"behind", "overlaps",
       [&] { return tw_all_reduce(begin, next, 3, TW_F32, TW_SUM, comm_, nullptr); }},
      {"before", "overlaps",
       [&] { return tw_all_reduce(next, begin, 3, TW_F32, TW_SUM, comm_, nullptr); }},
      {"scatter", "overlaps",
       [&] { return tw_reduce_scatter(begin, next, 3, TW_F32, TW_SUM, comm_, nullptr); }},
      {"gather", "overlaps", [&] { return tw_all_gather(next, begin, 3, TW_F32, comm_, nullptr); }},
  });
}

TEST_F(CArguments, ABucketThatIsInUseIsNamed) {
  ASSERT_EQ(CreateBucket([](auto* i) { i->name = "layer"; }), TW_OK) << tw_last_error();
  ASSERT_EQ(tw_bucket_start(bucket_, x_, x_, nullptr, nullptr, 0), TW_OK) << tw_last_error();
  ExpectRefused({{"a second start", "tensor 'layer' was started and not waited for",
                  [&] { return tw_bucket_start(bucket_, x_, x_, nullptr, nullptr, 0); }}});
  EXPECT_EQ(tw_bucket_wait(bucket_), TW_OK) << tw_last_error();
  tw_bucket_destroy(bucket_);
}

}  // namespace
