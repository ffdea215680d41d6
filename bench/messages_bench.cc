// Messages between two processes over loopback, by ZeroMQ with CURVE: throughput of bodies of one
// size in one direction, and round trips.
//
//   messages_bench [BODY_BYTES [CREDIT_BYTES]]
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/times.h"
#include "transport/messages/zmq/zmq_messages.h"

namespace thinwire {
namespace {

constexpr int kServer = 0, kWorker = 1, kRoundTrips = 2000;
constexpr double kSeconds = 2.0;

Deadline Soon() { return Clock::now() + std::chrono::seconds(30); }

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status);
}

ZmqOptions OptionsOf(int rank, size_t credit) {
  ZmqOptions options;
  options.rank = rank;
  options.key = GroupKey("", "a token of the benchmark");
  options.limits.credit = credit;
  return options;
}

Message NextMessage(MessagePlane& plane) {
  for (;;) {
    auto event = plane.Receive(Soon());
    Check(event.status());
    if (auto* message = std::get_if<Message>(&*event)) return std::move(*message);
    Check(std::get<PeerEvent>(*event).reason);
  }
}

// Answers empty bodies, takes others, until it is told to end; its answer to that is the processor
// time that it has used.
void Serve(ZmqMessagePlane& plane) {
  double began = 0.0;
  for (;;) {
    Message message = NextMessage(plane);
    if (message.head == "begin") began = ProcessorSeconds(RUSAGE_SELF);
    if (message.head == "end") {
      message.head = std::to_string(ProcessorSeconds(RUSAGE_SELF) - began);
    }
    if (message.body.empty()) Check(plane.Send(kWorker, 0, message.head, {}));
    if (message.head == "goodbye") break;
  }
  Check(plane.Close(Soon()));
}

std::string Ask(MessagePlane& plane, const std::string& head) {
  Check(plane.Send(kServer, -1, head, {}));  // behind all bodies
  return NextMessage(plane).head;
}

void Measure(MessagePlane& plane, size_t body_bytes, size_t credit) {
  Ask(plane, "warm up");
  std::vector<double> us;
  for (int i = 0; i < kRoundTrips; ++i) {
    const double begin = Now();
    Ask(plane, "round trip");
    us.push_back(1e6 * (Now() - begin));
  }
  std::printf("round trip: p50 %.0f us, p99 %.0f us\n", Quantile(us, 0.5), Quantile(us, 0.99));

  const std::vector<uint8_t> body(body_bytes, 1);
  Ask(plane, "begin");
  const double begin = Now(), processor = ProcessorSeconds(RUSAGE_SELF);
  uint64_t queued = 0;
  const uint64_t before = plane.bytes_sent();
  while (Now() - begin < kSeconds) {
    // A few credits ahead of what has left.
    if (queued - (plane.bytes_sent() - before) < 2 * credit + body_bytes) {
      Check(plane.Send(kServer, 0, "", body));
      queued += body_bytes;
    } else {
      usleep(50);
    }
  }
  const std::string served = Ask(plane, "end");
  const double seconds = Now() - begin;
  std::printf(
      "%zu-byte bodies, credit %zu: %.0f MB/s; processor seconds a GB: %.2f sender, %.2f "
      "receiver\n",
      body_bytes, credit, 1e-6 * static_cast<double>(queued) / seconds,
      (ProcessorSeconds(RUSAGE_SELF) - processor) / (1e-9 * static_cast<double>(queued)),
      std::atof(served.c_str()) / (1e-9 * static_cast<double>(queued)));
}

int Main(int argc, char** argv) {
  const size_t body_bytes = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : size_t{1} << 20;
  const size_t credit = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : MessageLimits().credit;
  int addresses[2];
  if (pipe(addresses) != 0) return 1;
  const pid_t server = fork();
  if (server == 0) {
    ZmqOptions options = OptionsOf(kServer, credit);
    options.listens = true;
    auto plane = StartZmqMessages(options);
    Check(plane.status());
    std::string address = (*plane)->address();
    address.resize(64);
    if (write(addresses[1], address.data(), address.size()) != 64) std::exit(1);
    Serve(**plane);
    return 0;
  }
  close(addresses[1]);
  char address[64];
  if (read(addresses[0], address, sizeof(address)) != sizeof(address)) return 1;
  ZmqOptions options = OptionsOf(kWorker, credit);
  options.calls[kServer] = address;
  auto plane = StartZmqMessages(options);
  Check(plane.status());
  auto joined = (*plane)->Receive(Soon());
  Check(joined.status());
  Measure(**plane, body_bytes, credit);
  Ask(**plane, "goodbye");
  plane->reset();
  int status = 0;
  waitpid(server, &status, 0);
  return status;
}

}  // namespace
}  // namespace thinwire

int main(int argc, char** argv) { return thinwire::Main(argc, argv); }
