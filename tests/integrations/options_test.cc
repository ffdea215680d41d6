// Structs that contain their size: callers compiled against an older or a newer thinwire.h.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"
#include "tests/integrations/old_caller.h"
#include "tests/own_folder.h"

namespace old {
#include "tests/integrations/old_options.h"
}  // namespace old

namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Options in exactly `bytes` bytes of memory, so that the address sanitizer finds an access beyond.
std::unique_ptr<tw_options, Free> OptionsOf(size_t bytes) {
  auto* options = static_cast<tw_options*>(std::malloc(bytes));
  std::memset(static_cast<void*>(options), 0xff, bytes);
  tw_options_init_sized(options, bytes);
  return std::unique_ptr<tw_options, Free>(options);
}

// The result of tw_comm_create; the message is empty if it succeeded.
struct Made {
  tw_status status;
  std::string message;
};

Made Create(const tw_options* options) {
  tw_comm* comm = nullptr;
  const tw_status status = tw_comm_create(options, &comm);
  EXPECT_EQ(comm != nullptr, status == TW_OK);
  tw_comm_destroy(comm);
  return {status, status == TW_OK ? "" : tw_last_error()};
}

#define EXPECT_SAME_FIELD(type, field)                          \
  EXPECT_EQ(offsetof(type, field), offsetof(old::type, field)); \
  EXPECT_EQ(sizeof(type::field), sizeof(old::type::field)) << #field

TEST(Options, FieldsOfTheFirstReleaseStayWhereTheyAre) {
  EXPECT_SAME_FIELD(tw_options, struct_size);
  EXPECT_SAME_FIELD(tw_options, rank);
  EXPECT_SAME_FIELD(tw_options, size);
  EXPECT_SAME_FIELD(tw_options, store);
  EXPECT_SAME_FIELD(tw_options, local_group);
  EXPECT_SAME_FIELD(tw_options, store_path);
  EXPECT_SAME_FIELD(tw_options, group);
  EXPECT_SAME_FIELD(tw_options, device);
  EXPECT_SAME_FIELD(tw_options, cuda_library);
  EXPECT_SAME_FIELD(tw_options, codec);
  EXPECT_SAME_FIELD(tw_options, momentum);
  EXPECT_SAME_FIELD(tw_options, nesterov);
  EXPECT_SAME_FIELD(tw_options, policy);
  EXPECT_SAME_FIELD(tw_options, planned);
  EXPECT_SAME_FIELD(tw_options, interface_name);
  EXPECT_SAME_FIELD(tw_options, rendezvous_host);
  EXPECT_SAME_FIELD(tw_options, lanes);
  EXPECT_SAME_FIELD(tw_options, chunk_bytes);
  EXPECT_SAME_FIELD(tw_options, min_bytes);
  EXPECT_SAME_FIELD(tw_options, no_raw);
  EXPECT_SAME_FIELD(tw_options, timeout_ms);
  EXPECT_SAME_FIELD(tw_options, trace_path);
  EXPECT_EQ(offsetof(tw_options, flight_path), sizeof(old::tw_options));
  EXPECT_SAME_FIELD(tw_simulation, struct_size);
  EXPECT_SAME_FIELD(tw_simulation, options);
  EXPECT_SAME_FIELD(tw_simulation, layers);
  EXPECT_SAME_FIELD(tw_simulation, num_layers);
  EXPECT_SAME_FIELD(tw_simulation, between_s);
  EXPECT_SAME_FIELD(tw_simulation, barrier);
  EXPECT_SAME_FIELD(tw_simulation, planned);
  EXPECT_SAME_FIELD(tw_simulation, bytes_per_s);
  EXPECT_SAME_FIELD(tw_simulation, latency_s);
  EXPECT_SAME_FIELD(tw_simulation, burst_bytes);
  EXPECT_SAME_FIELD(tw_simulation, overhead_s);
  EXPECT_SAME_FIELD(tw_simulation, encode_s);
  EXPECT_SAME_FIELD(tw_simulation, reduce_s);
  EXPECT_SAME_FIELD(tw_simulation, decode_s);
  EXPECT_SAME_FIELD(tw_simulation, cpu_s_per_byte);
  EXPECT_SAME_FIELD(tw_simulation, contention);
  EXPECT_SAME_FIELD(tw_simulation, steps);
}

TEST(Options, StructsWithoutASizeNeverGrow) {
  EXPECT_EQ(sizeof(tw_store), sizeof(old::tw_store));
  EXPECT_EQ(sizeof(tw_segment), sizeof(old::tw_segment));
  EXPECT_EQ(sizeof(tw_stats), sizeof(old::tw_stats));
  EXPECT_EQ(sizeof(tw_layer), sizeof(old::tw_layer));
}

// The other rank is compiled against today's header. The handshake compares most options, so both
// ranks read the same fields; the trace shows that the last field is read as well.
TEST(Options, ACallerOfTheFirstReleaseWorksWithOneOfToday) {
  const thinwire::OwnFolder folder;
  const std::string trace = folder.File("trace.json");
  std::vector<float> first(5000, 1.0f), second(5000, 3.0f);
  int status = -1;
  std::thread rank_0([&] {
    status = OldCallerAllReduce(0, "old caller", trace.c_str(), first.data(), first.size());
  });
  std::thread rank_1([&] {
    tw_options options;
    tw_options_init(&options);
    options.rank = 1;
    options.size = 2;
    options.local_group = "old caller";
    options.codec = "int8";
    options.momentum = 0.5f;
    options.policy = "fifo";
    options.lanes = 3;
    options.chunk_bytes = 8192;
    options.no_raw = 1;
    options.timeout_ms = 10000;
    tw_comm* comm = nullptr;
    ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
    tw_work* work = nullptr;
    ASSERT_EQ(tw_all_reduce_async(second.data(), second.data(), second.size(), TW_F32, TW_MEAN,
                                  comm, nullptr, "w", 0, &work),
              TW_OK);
    EXPECT_EQ(tw_wait(work), TW_OK) << tw_last_error();
    tw_comm_destroy(comm);
  });
  rank_0.join();
  rank_1.join();
  EXPECT_EQ(status, TW_OK);
  EXPECT_NEAR(first[0], 2.0f, 0.05f);
  EXPECT_EQ(first, second);
  EXPECT_TRUE(std::filesystem::exists(folder.File("trace.rank0.json")));
}

TEST(Options, ACallerOfTheFirstReleaseSimulates) {
  double step_s = 0.0;
  ASSERT_EQ(OldCallerSimulate(&step_s), TW_OK) << tw_last_error();
  EXPECT_GT(step_s, 0.006) << "which computing alone takes";
}

TEST(Options, TheSymbolOfTheFirstReleaseWritesItsFieldsOnly) {
  tw_options options;
  std::memset(static_cast<void*>(&options), 0xff, sizeof(options));
  void (*init)(tw_options*) = &tw_options_init;
  init(&options);
  EXPECT_EQ(options.struct_size, sizeof(old::tw_options));
  EXPECT_EQ(options.size, 1);
  EXPECT_EQ(options.trace_path, nullptr);
  EXPECT_NE(options.flight_path, nullptr) << "it lies behind the old struct, so it stays as it was";
  EXPECT_EQ(Create(&options).status, TW_OK) << "and it is not read";
  tw_options_init(&options);
  EXPECT_EQ(options.struct_size, sizeof(tw_options));
  EXPECT_EQ(options.flight_path, nullptr);
}

TEST(Options, ALongerStructIsTakenUnlessItSaysMoreThanWeKnow) {
  constexpr size_t kNewer = sizeof(tw_options) + 16;
  const auto options = OptionsOf(kNewer);
  EXPECT_EQ(Create(options.get()).status, TW_OK) << tw_last_error();
  reinterpret_cast<char*>(options.get())[kNewer - 1] = 1;
  const Made made = Create(options.get());
  EXPECT_EQ(made.status, TW_INVALID_ARGUMENT);
  for (const std::string& part :
       {std::to_string(kNewer), std::to_string(sizeof(tw_options)), std::string("leave it zero")}) {
    EXPECT_NE(made.message.find(part), std::string::npos) << made.message;
  }
}

TEST(Options, ASizeThatNoReleaseHasHadIsRefused) {
  for (const size_t bytes : {size_t{0}, size_t{8}, sizeof(old::tw_options) - 8,
                             sizeof(old::tw_options) + 4, size_t{1} << 20, ~size_t{7}}) {
    tw_options options;
    tw_options_init(&options);
    options.struct_size = bytes;
    const Made made = Create(&options);
    EXPECT_EQ(made.status, TW_INVALID_ARGUMENT) << bytes;
    EXPECT_NE(made.message.find(std::to_string(sizeof(tw_options))), std::string::npos)
        << made.message;
  }
}

TEST(Options, TheReservedFieldSaysWhatTookItsPlace) {
  tw_options options;
  tw_options_init(&options);
  options.check_replicas = 1;
  const Made made = Create(&options);
  EXPECT_EQ(made.status, TW_INVALID_ARGUMENT);
  for (const char* part : {"check_replicas is 1, expected 0", "tw_digest"}) {
    EXPECT_NE(made.message.find(part), std::string::npos) << made.message;
  }
}

// A struct that is too small for any release is only zeroed.
TEST(Options, InitKeepsWithinAnySize) {
  for (const size_t bytes : {size_t{1}, size_t{8}, sizeof(old::tw_options) - 8}) {
    const auto options = OptionsOf(bytes);
    for (size_t i = 0; i < bytes; ++i) {
      EXPECT_EQ(reinterpret_cast<const char*>(options.get())[i], 0);
    }
  }
  tw_options_init(nullptr);
}

TEST(Options, ASimulationOfAnotherSizeIsRefused) {
  tw_options options;
  tw_options_init(&options);
  const tw_layer layer = {1000, 0.001, 0.001};
  tw_simulation simulation = {};
  simulation.struct_size = sizeof(simulation);
  simulation.options = &options;
  simulation.layers = &layer;
  simulation.num_layers = 1;
  simulation.bytes_per_s = 1e9;
  double step_s = 0.0;
  EXPECT_EQ(tw_simulate(&simulation, &step_s, nullptr), TW_OK) << tw_last_error();
  options.struct_size = 16;
  EXPECT_EQ(tw_simulate(&simulation, &step_s, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("tw_options"), std::string::npos);
  tw_options_init(&options);
  simulation.struct_size = sizeof(old::tw_simulation) - 8;
  EXPECT_EQ(tw_simulate(&simulation, &step_s, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("tw_simulation"), std::string::npos);
  simulation.struct_size = sizeof(simulation);
  simulation.options = nullptr;
  EXPECT_EQ(tw_simulate(&simulation, &step_s, nullptr), TW_INVALID_ARGUMENT);
}

}  // namespace
