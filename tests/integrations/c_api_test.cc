// The C interface as a C caller sees it: codes, messages, and no way to crash it with bad input.
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"
#include "tests/own_folder.h"

namespace {

tw_options OptionsFor(int rank, int size, const std::string& folder) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = size;
  options.store_path = folder.c_str();
  options.timeout_ms = 60000;
  return options;
}

// Options of one rank of a group whose ranks are threads of this process.
tw_options LocalOptions(int rank, int size, const char* group) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = size;
  options.local_group = group;
  return options;
}

// Calls be(rank) on one thread per rank.
void OnThreads(int world, const std::function<void(int)>& be) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) ranks.emplace_back(be, rank);
  for (std::thread& rank : ranks) rank.join();
}

TEST(CApi, EncodeAndDecodeRoundTrip) {
  for (const char* spec : {"fp32", "bf16", "int8", "int4", "int4:block=128"}) {
    std::vector<float> x(1000), back(1000), residual(1000);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) - 500;
    size_t bytes = 0;
    ASSERT_EQ(tw_encoded_bytes(spec, x.size(), &bytes), TW_OK);
    std::vector<uint8_t> wire(bytes);
    ASSERT_EQ(tw_encode(spec, x.data(), x.size(), residual.data(), wire.data(), bytes, &bytes),
              TW_OK);
    ASSERT_EQ(tw_decode(spec, wire.data(), bytes, back.data(), back.size()), TW_OK);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_EQ(back[i] + residual[i], x[i]) << spec << " " << i;
  }
}

TEST(CApi, ListsItsCodecsAndTheirParameters) {
  size_t count = 0;
  for (; tw_codec_name(count) != nullptr; ++count) {
    tw_codec codec{};
    codec.struct_size = sizeof(codec);
    ASSERT_EQ(tw_codec_info(tw_codec_name(count), &codec), TW_OK) << tw_last_error();
    EXPECT_STREQ(codec.name, tw_codec_name(count));
    EXPECT_STREQ(codec.spec, codec.name);
    EXPECT_STREQ(codec.up, codec.name);
    EXPECT_STRNE(codec.help, "");
    size_t bytes = 0;
    ASSERT_EQ(tw_encoded_bytes(codec.spec, size_t{1} << 24, &bytes), TW_OK);
    EXPECT_NEAR(codec.up_bits, 8.0 * bytes / (1 << 24), 1e-9);
    for (size_t i = 0; i < codec.num_parameters; ++i) {
      tw_parameter parameter{};
      parameter.struct_size = sizeof(parameter);
      ASSERT_EQ(tw_codec_parameter(codec.spec, i, &parameter), TW_OK) << tw_last_error();
      EXPECT_STREQ(parameter.value, parameter.default_value);
      const std::string spec =
          std::string(codec.name) + ":" + parameter.key + "=" + parameter.value;
      EXPECT_EQ(tw_encoded_bytes(spec.c_str(), 1, &bytes), TW_OK) << spec;
    }
  }
  EXPECT_GE(count, 6u);
  EXPECT_EQ(tw_codec_name(SIZE_MAX), nullptr);
}

TEST(CApi, ACodecsInfoIsThatOfItsSpec) {
  tw_codec codec{};
  codec.struct_size = sizeof(codec);
  ASSERT_EQ(tw_codec_info("onebit:block=512", &codec), TW_OK);
  EXPECT_STREQ(codec.up, "onebit:block=512");
  EXPECT_STREQ(codec.down, "int4:block=512");
  EXPECT_EQ(codec.momentum, TW_MOMENTUM_REQUIRED);
  EXPECT_TRUE(codec.uses_feedback && codec.has_kernels && !codec.entries);
  EXPECT_NEAR(codec.up_bits, 1.03, 0.01);
  EXPECT_NEAR(codec.down_bits, 4.03, 0.01);
  tw_parameter parameter{};
  parameter.struct_size = sizeof(parameter);
  ASSERT_EQ(tw_codec_parameter("onebit:block=512", 0, &parameter), TW_OK);
  EXPECT_STREQ(parameter.key, "block");
  EXPECT_STREQ(parameter.value, "512");
  EXPECT_STREQ(parameter.default_value, "256");

  ASSERT_EQ(tw_codec_info("topk:density=0.001", &codec), TW_OK);
  EXPECT_TRUE(codec.entries && codec.has_kernels);
  EXPECT_EQ(codec.momentum, TW_MOMENTUM_ADVISED);
  ASSERT_EQ(tw_codec_info("int8:seed=1,down=int4", &codec), TW_OK);
  EXPECT_STREQ(codec.spec, "int8:seed=1,down=int4");
  EXPECT_EQ(codec.momentum, TW_MOMENTUM_UNUSED);

  // The longest possible spec fits.
  const char* longest =
      "int4:block=4096,rounding=stochastic,seed=18446744073709551615,"
      "down=int4:block=2048,rounding=stochastic,seed=18446744073709551614";
  ASSERT_EQ(tw_codec_info(longest, &codec), TW_OK);
  EXPECT_STREQ(codec.spec, longest);
}

TEST(CApi, ACodecsInfoRefusesWhatItCannotGive) {
  tw_codec codec{};
  EXPECT_EQ(tw_codec_info("int4", nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_codec_info("int4", &codec), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("sizeof(tw_codec)"), std::string::npos);
  codec.struct_size = sizeof(codec);
  EXPECT_EQ(tw_codec_info(nullptr, &codec), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_codec_info("int5", &codec), TW_INVALID_ARGUMENT);
  tw_parameter parameter{};
  parameter.struct_size = sizeof(parameter);
  EXPECT_EQ(tw_codec_parameter("onebit", 1, &parameter), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("has 1 parameters"), std::string::npos);
  EXPECT_EQ(tw_codec_parameter("fp32", 0, nullptr), TW_INVALID_ARGUMENT);

  // A caller that was compiled against a shorter struct gets only the fields of that.
  codec.num_parameters = 99;
  codec.struct_size = offsetof(tw_codec, num_parameters);
  ASSERT_EQ(tw_codec_info("int4", &codec), TW_OK);
  EXPECT_STREQ(codec.name, "int4");
  EXPECT_EQ(codec.num_parameters, 99u);
}

TEST(CApi, BadInputIsACodeAndAMessage) {
  float x[4] = {};
  uint8_t wire[64];
  size_t bytes;
  EXPECT_EQ(tw_encode("int5", x, 4, nullptr, wire, 64, &bytes), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("nearest"), std::string::npos);
  EXPECT_EQ(tw_encode(nullptr, x, 4, nullptr, wire, 64, &bytes), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_encode("int4", nullptr, 4, nullptr, wire, 64, &bytes), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_encode("int4", x, 4, nullptr, wire, 31, &bytes), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_decode("int4", wire, 31, x, 4), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_decode("int4", wire, 33, x, 4), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_comm_create(nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_wait(nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_all_reduce(x, x, 4, TW_F32, TW_MEAN, nullptr, nullptr), TW_INVALID_ARGUMENT);
  const thinwire::OwnFolder folder;
  tw_comm* comm = nullptr;
  tw_options options = OptionsFor(2, 2, folder.path());
  EXPECT_EQ(tw_comm_create(&options, &comm), TW_INVALID_ARGUMENT) << "rank 2 of 2";
  options = OptionsFor(0, 2, folder.path());
  options.struct_size = 8;
  EXPECT_EQ(tw_comm_create(&options, &comm), TW_INVALID_ARGUMENT) << "another header's struct";
  options = OptionsFor(0, 2, folder.path());
  options.codec = "int5";
  EXPECT_EQ(tw_comm_create(&options, &comm), TW_INVALID_ARGUMENT);
  EXPECT_EQ(comm, nullptr);
}

TEST(CApi, AWorldOfOneCopies) {
  tw_options options;
  tw_options_init(&options);
  tw_comm* comm = nullptr;
  ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
  float in[3] = {1, 2, 3}, out[3] = {};
  EXPECT_EQ(tw_all_reduce(in, out, 3, TW_F32, TW_MEAN, comm, nullptr), TW_OK);
  EXPECT_EQ(out[2], 3);
  EXPECT_EQ(tw_all_reduce(in, out, 3, static_cast<tw_dtype>(9), TW_MEAN, comm, nullptr),
            TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_all_reduce(in, out, 3, TW_F32, static_cast<tw_op>(9), comm, nullptr),
            TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_all_reduce(in, out, 3, TW_F32, TW_MEAN, comm, in), TW_INVALID_ARGUMENT)
      << "a stream, and a communicator of the host";
  tw_comm_destroy(comm);
}

TEST(CApi, ResidualsComeOutAndGoBackIn) {
  const thinwire::OwnFolder folder;
  OnThreads(2, [&](int rank) {
    const tw_options options = OptionsFor(rank, 2, folder.path());
    tw_comm* comm = nullptr;
    ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
    std::vector<float> g(40000), first(40000), second(40000);
    for (size_t i = 0; i < g.size(); ++i) g[i] = static_cast<float>(i % 97 + rank);
    tw_work* work = nullptr;
    ASSERT_EQ(tw_all_reduce_async(g.data(), g.data(), g.size(), TW_F32, TW_MEAN, comm, nullptr, "w",
                                  0, &work),
              TW_OK);
    ASSERT_EQ(tw_wait(work), TW_OK) << tw_last_error();
    size_t count = 0, numel = 0;
    char name[16];
    ASSERT_EQ(tw_residual_count(comm, &count), TW_OK);
    ASSERT_EQ(count, 1u);
    ASSERT_EQ(tw_residual_info(comm, 0, name, sizeof(name), &numel), TW_OK);
    EXPECT_STREQ(name, "w");
    ASSERT_EQ(numel, g.size());
    ASSERT_EQ(tw_residual_get(comm, "w", first.data(), second.data(), nullptr, numel), TW_OK);
    first[0] = 0.25f;
    ASSERT_EQ(tw_residual_set(comm, "w", first.data(), second.data(), nullptr, numel), TW_OK);
    std::vector<float> again(40000), other(40000);
    ASSERT_EQ(tw_residual_get(comm, "w", again.data(), other.data(), nullptr, numel), TW_OK);
    EXPECT_EQ(again, first);
    EXPECT_EQ(other, second);
    std::vector<float> at_once(40000, -1), momentum(40000, -1);
    const tw_residual_array arrays[] = {{"w", "first", at_once.data(), numel},
                                        {"w", "second", other.data(), numel},
                                        {"w", "momentum", momentum.data(), numel}};
    ASSERT_EQ(tw_residual_get_all(comm, arrays, 3), TW_OK) << tw_last_error();
    EXPECT_EQ(at_once, first);
    EXPECT_EQ(other, second);
    EXPECT_EQ(momentum, std::vector<float>(40000)) << "none is kept";
    at_once[1] = 0.5f;
    ASSERT_EQ(tw_residual_set_all(comm, arrays, 2), TW_OK) << tw_last_error();
    ASSERT_EQ(tw_residual_get(comm, "w", again.data(), other.data(), nullptr, numel), TW_OK);
    EXPECT_EQ(again, at_once);
    first = at_once;
    EXPECT_EQ(tw_residual_get(comm, "v", again.data(), other.data(), nullptr, numel),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_residual_set(comm, "w", again.data(), other.data(), nullptr, 7),
              TW_INVALID_ARGUMENT);
    tw_stats stats;
    ASSERT_EQ(tw_comm_stats(comm, &stats), TW_OK);
    EXPECT_EQ(stats.raw_bytes, 160000u);
    EXPECT_GT(static_cast<double>(stats.raw_bytes) / static_cast<double>(stats.wire_bytes), 7.7);
    tw_comm_destroy(comm);
  });
}

TEST(CApi, AnotherCodecOnOneRankIsAMismatchOnBoth) {
  const thinwire::OwnFolder folder;
  OnThreads(2, [&](int rank) {
    tw_options options = OptionsFor(rank, 2, folder.path());
    options.codec = rank == 0 ? "int4" : "int8";
    tw_comm* comm = nullptr;
    EXPECT_EQ(tw_comm_create(&options, &comm), TW_MISMATCH);
    const std::string message = tw_last_error();
    EXPECT_NE(message.find("codec=int4"), std::string::npos) << message;
    EXPECT_NE(message.find("codec=int8"), std::string::npos) << message;
  });
}

TEST(CApi, ACallersReasonReachesEveryRank) {
  OnThreads(2, [](int rank) {
    const tw_options options = LocalOptions(rank, 2, "reason");
    tw_comm* comm = nullptr;
    ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
    if (rank == 1) {
      EXPECT_EQ(tw_comm_fail(comm, TW_OK, "no failure"), TW_INVALID_ARGUMENT);
      EXPECT_EQ(tw_comm_fail(comm, TW_MISMATCH, nullptr), TW_INVALID_ARGUMENT);
      EXPECT_EQ(tw_comm_fail(comm, TW_MISMATCH, "rank 1 has other plans"), TW_OK);
      EXPECT_EQ(tw_comm_fail(comm, TW_TIMEOUT, "too late"), TW_OK);  // the first reason stays
    }
    std::vector<float> x(100000);
    EXPECT_EQ(tw_all_reduce(x.data(), x.data(), x.size(), TW_F32, TW_MEAN, comm, nullptr),
              TW_MISMATCH);
    const std::string message = tw_last_error();
    EXPECT_NE(message.find("rank 1 has other plans"), std::string::npos) << message;
    tw_comm_destroy(comm);
  });
}

// Ranks as threads of this process, with momentum, several codecs and a step that is set.
TEST(CApi, ALocalGroupOwnsMomentum) {
  OnThreads(3, [](int rank) {
    tw_options options = LocalOptions(rank, 3, "momentum");
    options.codec = "onebit;fp32;topk:density=0.5";
    options.momentum = 0.5f;
    options.no_raw = 1;
    tw_comm* comm = nullptr;
    ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
    char spec[64];
    ASSERT_EQ(tw_comm_codec(comm, 0, spec, sizeof(spec)), TW_OK);
    EXPECT_STREQ(spec, "onebit");
    ASSERT_EQ(tw_comm_codec(comm, 2, spec, sizeof(spec)), TW_OK);
    EXPECT_STREQ(spec, "int4") << "which costs fewer bytes";
    EXPECT_EQ(tw_comm_codec(comm, 3, spec, sizeof(spec)), TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_comm_codec(comm, 0, spec, 3), TW_INVALID_ARGUMENT);
    int raw = 1;
    ASSERT_EQ(tw_comm_goes_raw(comm, 1, TW_F32, &raw), TW_OK);
    EXPECT_EQ(raw, 0);
    ASSERT_EQ(tw_comm_set_step(comm, 7), TW_OK);
    const tw_segment segments[] = {{"w", 0, 3000, 3000, 0}, {"b", 0, 1000, 1000, 1}};
    std::vector<float> g(4000), first(1000), second(1000), m(1000);
    for (int step = 0; step < 3; ++step) {
      std::fill(g.begin(), g.end(), 1.0f);
      tw_work* work = nullptr;
      ASSERT_EQ(tw_all_reduce_segments(g.data(), g.data(), g.size(), TW_F32, TW_MEAN, comm, nullptr,
                                       "bucket", 0, segments, 2, &work),
                TW_OK);
      ASSERT_EQ(tw_wait(work), TW_OK) << tw_last_error();
    }
    EXPECT_EQ(g[3500], 1.75f) << "fp32: 1 + 0.5 + 0.25";
    EXPECT_NEAR(g[5], 1.75f, 0.02f) << "all equal, so one bit and a scale say all";
    ASSERT_EQ(tw_residual_get(comm, "b", first.data(), second.data(), m.data(), m.size()), TW_OK);
    EXPECT_EQ(m[0], 1.75f);
    EXPECT_EQ(tw_all_reduce(g.data(), g.data(), g.size(), TW_F32, TW_MEAN, comm, nullptr),
              TW_INVALID_ARGUMENT)
        << "momentum needs a name";
    tw_comm_destroy(comm);
  });
}

TEST(CApi, MalformedEntriesAreRefused) {
  std::vector<float> x(100, 1.0f), y(100);
  std::vector<uint8_t> wire(64);
  size_t bytes = 0;
  ASSERT_EQ(tw_encode("topk:density=0.05", x.data(), 100, nullptr, wire.data(), 64, &bytes), TW_OK);
  ASSERT_EQ(tw_decode("topk:density=0.05", wire.data(), bytes, y.data(), 100), TW_OK);
  wire[0] = 77;
  EXPECT_EQ(tw_decode("topk:density=0.05", wire.data(), bytes, y.data(), 100), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("topk counts"), std::string::npos);
}

// A garbage collector may destroy a work after a call has failed and before its message is read.
TEST(CApi, AWorkThatIsDroppedLeavesTheMessageAlone) {
  std::vector<tw_comm*> comms(2);
  OnThreads(2, [&](int rank) {
    const tw_options options = LocalOptions(rank, 2, "dropped");
    EXPECT_EQ(tw_comm_create(&options, &comms[rank]), TW_OK) << tw_last_error();
  });
  std::vector<float> x(100000);
  tw_work* work = nullptr;
  ASSERT_EQ(tw_all_reduce_async(x.data(), x.data(), x.size(), TW_F32, TW_MEAN, comms[0], nullptr,
                                "w", 0, &work),
            TW_OK);
  ASSERT_EQ(tw_comm_abort(comms[0]), TW_OK);
  EXPECT_EQ(tw_wait(nullptr), TW_INVALID_ARGUMENT);
  const std::string before = tw_last_error();
  tw_work_destroy(work);
  tw_work_destroy(nullptr);
  EXPECT_EQ(tw_last_error(), before);
  for (tw_comm* const comm : comms) tw_comm_destroy(comm);
}

TEST(CApi, EveryStatusComesBackAsItWasGiven) {
  for (const tw_status given :
       {TW_INVALID_ARGUMENT, TW_MISMATCH, TW_TIMEOUT, TW_PEER_LOST, TW_UNAVAILABLE, TW_ABORTED,
        TW_INTERNAL, TW_DATA_LOSS, TW_OUT_OF_MEMORY}) {
    tw_options options;
    tw_options_init(&options);
    tw_comm* comm = nullptr;
    ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
    EXPECT_EQ(tw_comm_fail(comm, given, "the caller's reason"), TW_OK);
    float x[4] = {};
    EXPECT_EQ(tw_all_reduce(x, x, 4, TW_F32, TW_SUM, comm, nullptr), given) << tw_last_error();
    tw_comm_destroy(comm);
  }
}

}  // namespace
