// The flight recorder, and the engine's description of itself: the last events, whole and in order,
// and which rank waits for which, also in a file after a failure.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

#include "schedule/engine/records.h"
#include "tests/own_folder.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

std::vector<std::string> Lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Returns one line per event, without the first line, which is the topology.
std::vector<std::string> EventsOf(const Records& records) {
  std::vector<std::string> lines = Lines(records.LastEvents());
  lines.erase(lines.begin());
  return lines;
}

TEST(Events, AreToldInOrderWithNamesCut) {
  Records records({0, 2}, {});
  EXPECT_EQ(records.LastEvents(), "dense allreduces go flat\n");
  const std::string longest(40, 'n');
  records.Event(FlightEvent::kSubmitted, longest + "more", 0, 0, 1234);
  records.Event(FlightEvent::kFrameOut, "g", 0, -1, 2);
  records.Event(FlightEvent::kFrameIn, "", 0, 3, 1);
  records.Event(FlightEvent::kStarted, "g", 7, 0, 1);
  records.Event(FlightEvent::kHopBegun, "g", 7, 0, 2);
  records.Event(FlightEvent::kTensorDone, "g");
  const std::vector<std::string> lines = EventsOf(records);
  const std::vector<std::string> expected = {"submitted '" + longest + "' 1234 elements",
                                             "frame out announce to everyone about 'g'",
                                             "frame in report from rank 3",
                                             "started 'g' chunk 7, predicted",
                                             "hop begun 'g' chunk 7 hop 2",
                                             "tensor done 'g'"};
  ASSERT_EQ(lines.size(), expected.size()) << records.LastEvents();
  double before = 1e9;
  for (size_t i = 0; i < lines.size(); ++i) {
    const size_t at = lines[i].find(" s  ");
    ASSERT_NE(at, std::string::npos) << lines[i];
    EXPECT_EQ(lines[i].substr(at + 4), expected[i]);
    const double ago = -std::stod(lines[i].substr(0, at));
    EXPECT_LE(ago, before) << "oldest first";
    before = ago;
  }
}

TEST(Events, TheLastAreKept) {
  Records records({0, 2}, {});
  constexpr size_t kMore = 10;
  for (size_t i = 0; i < Records::kEvents + kMore; ++i) {
    records.Event(FlightEvent::kSubmitted, "g", 0, 0, i);
  }
  const std::vector<std::string> lines = EventsOf(records);
  ASSERT_EQ(lines.size(), Records::kEvents);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_TRUE(lines[i].ends_with("'g' " + std::to_string(i + kMore) + " elements")) << lines[i];
  }
}

// Name, chunk and detail of an event follow from one number, so a mixture of two events is noticed.
TEST(Events, NoneIsTornWhileManyThreadsRecord) {
  constexpr int kThreads = 8;
  constexpr uint64_t kEach = 100'000;
  Records records({0, 2}, {});
  std::atomic<int> left = kThreads;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach; ++i) {
        const uint64_t number = i * kThreads + t;
        const std::string name(1 + number % 40, static_cast<char>('a' + number % 26));
        records.Event(FlightEvent::kHopBegun, name, number, 0, number);
      }
      --left;
    });
  }
  const std::regex form("-[0-9.]+ s  hop begun '([a-z]+)' chunk ([0-9]+) hop ([0-9]+)");
  size_t seen = 0;
  bool last = false;
  for (bool good = true; good && !last;) {
    last = left == 0;
    seen = 0;
    for (const std::string& line : EventsOf(records)) {
      std::smatch match;
      good = std::regex_match(line, match, form);
      if (good) {
        const uint64_t number = std::stoull(match[2]);
        const std::string name(1 + number % 40, static_cast<char>('a' + number % 26));
        good = match[3] == match[2] && match[1] == name;
      }
      EXPECT_TRUE(good) << line;
      if (!good) break;
      ++seen;
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(seen, Records::kEvents - kThreads) << "but for a slot that a sleeper held";
}

bool Says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(Describe, SaysWhoWaitsForWhom) {
  std::atomic<bool> looked = false;
  RunRanks(Wire::kInProcess, 3, SmallChunks("int4"), [&](int rank, Engine& engine) {
    EXPECT_TRUE(Says(engine.Describe(), "rank " + std::to_string(rank) + " of 3: in order"));
    std::vector<float> values(3000);
    if (rank == 2) {
      while (!looked) std::this_thread::yield();
      ASSERT_TRUE(AllReduce(engine, values, "weights").ok());
      return;
    }
    auto work = engine.Start({.input = View(values), .output = View(values), .key = "weights"});
    ASSERT_TRUE(work.ok());
    EXPECT_TRUE(Says(engine.Describe(), "tensor 'weights' call 0, 3000 elements, in flight"))
        << engine.Describe();
    if (rank == 0) {
      // Rank 1's report may still be on its way.
      const std::string waits = "tensor 'weights' call 0 waits for rank 2 to submit it";
      const auto deadline = Clock::now() + std::chrono::seconds(30);
      while (!Says(engine.Describe(), waits) && Clock::now() < deadline) std::this_thread::yield();
      EXPECT_TRUE(Says(engine.Describe(), waits)) << engine.Describe();
      looked = true;
    }
    ASSERT_TRUE((*work)->Wait().ok());
    EXPECT_TRUE(Says(engine.Describe(), "tensor done 'weights'"));
    EXPECT_FALSE(Says(engine.Describe(), "in flight")) << engine.Describe();
  });
}

TEST(Describe, GoesIntoAFileOnEveryRankWithTheFirstFailure) {
  Options options = SmallChunks("int4");
  const OwnFolder folder;
  options.flight_path = folder.File("flight.txt");
  std::vector<std::stringstream> texts;
  // On an overloaded machine rank 2 may be late as well, so each further attempt has more time.
  for (options.timeout = std::chrono::milliseconds(300); options.timeout < std::chrono::seconds(60);
       options.timeout *= 5) {
    std::barrier all(3);
    RunRanks(Wire::kInProcess, 3, options, [&](int rank, Engine& engine) {
      std::vector<float> values(3000);
      if (rank == 1) {
        while (engine.status().ok()) std::this_thread::yield();
      } else {
        EXPECT_TRUE(absl::IsDeadlineExceeded(AllReduce(engine, values, "weights")));
      }
      all.arrive_and_wait();  // else a rank without the reason would see this one as lost
    });
    texts = std::vector<std::stringstream>(3);
    for (int rank = 0; rank < 3; ++rank) {
      std::ifstream in(PathOfRank(options.flight_path, rank));
      ASSERT_TRUE(in.good()) << rank;
      texts[rank] << in.rdbuf();
    }
    if (std::all_of(texts.begin(), texts.end(), [](const std::stringstream& text) {
          return Says(text.str(), "rank 1 never submitted it");
        })) {
      break;
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    const std::stringstream& text = texts[rank];
    const std::string first = "rank " + std::to_string(rank) + " of 3 failed: DEADLINE_EXCEEDED";
    for (const std::string& words : {first, std::string("rank 1 never submitted it"),
                                     std::string("failed 'tensor 'weights'")}) {
      EXPECT_TRUE(Says(text.str(), words)) << words << " in\n" << text.str();
    }
    EXPECT_EQ(Says(text.str(), "submitted 'weights' 3000 elements"), rank != 1) << text.str();
  }
}

// A peer that leaves after its goodbye has not failed.
TEST(Describe, WritesNoFileWhereNothingFails) {
  const OwnFolder folder;
  Options options = SmallChunks("int4");
  options.flight_path = folder.File("flight.txt");
  for (int round = 0; round < 30; ++round) {
    RunRanks(Wire::kInProcess, 3, options, [](int, Engine& engine) {
      std::vector<float> values(3000);
      EXPECT_TRUE(AllReduce(engine, values, "weights").ok());
    });
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_FALSE(std::filesystem::exists(PathOfRank(options.flight_path, rank))) << round;
    }
  }
}

}  // namespace
}  // namespace thinwire
