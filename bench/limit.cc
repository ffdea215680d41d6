#include "bench/limit.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "bench/times.h"
#include "bench/twins.h"
#include "compress/codec_spec.h"

namespace thinwire {
namespace {

void Check(bool fine, const char* what) {
  if (fine) return;
  std::perror(what);
  std::exit(1);
}

sockaddr_in AddressOf(const std::string& interface) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (interface.empty()) return address;
  ifaddrs* list = nullptr;
  Check(getifaddrs(&list) == 0, "getifaddrs");
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr != nullptr && at->ifa_addr->sa_family == AF_INET && at->ifa_name == interface)
      address.sin_addr = reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr;
  }
  freeifaddrs(list);
  return address;
}

// Rank 0 listens, and leaves its address in a file.
int Connect(int rank, const std::string& folder, const std::string& interface) {
  const std::string path = folder + "/limit";
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = AddressOf(interface);
  socklen_t size = sizeof(address);
  int connection = fd;
  if (rank == 0) {
    Check(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0, "bind");
    Check(listen(fd, 1) == 0, "listen");
    Check(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0, "getsockname");
    std::ofstream(path + ".part").write(reinterpret_cast<const char*>(&address), size);
    std::filesystem::rename(path + ".part", path);
    connection = accept(fd, nullptr, nullptr);
    close(fd);
  } else {
    while (!std::filesystem::exists(path))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::ifstream(path).read(reinterpret_cast<char*>(&address), size);
    Check(connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0, "connect");
  }
  Check(connection >= 0, "accept");
  const int on = 1;
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return connection;
}

// Wire bytes that a rank of two sends, which are as many as it receives.
size_t WireBytes(const CodecPair& codec, size_t numel) {
  if (codec.up.traits().entries()) return EncodedBytes(codec.up, numel);
  return EncodedBytes(codec.up, numel / 2) + EncodedBytes(codec.down, numel / 2);
}

}  // namespace

struct Limit::Arrays {
  explicit Arrays(size_t floats)
      : g(twin::Aligned<float>(floats)),
        r(twin::Aligned<float>(floats)),
        out(twin::Aligned<float>(floats)),
        codes(twin::Aligned<uint8_t>(4 * floats)),
        peer(twin::Aligned<uint8_t>(4 * floats)) {}

  const std::unique_ptr<float, twin::Free> g, r, out;
  const std::unique_ptr<uint8_t, twin::Free> codes, peer;
};

Limit::Limit(int rank, const std::string& folder, const std::string& interface)
    : socket_(Connect(rank, folder, interface)) {}

Limit::~Limit() { close(socket_); }

LimitTimes Limit::Measure(const std::string& codec, size_t numel) {
  arrays_ = std::make_unique<Arrays>(numel + 4096);
  const size_t bytes = WireBytes(*CodecPair::Parse(codec), numel);
  std::vector<LimitTimes> all;
  for (int i = 0; i < 9; ++i) {
    Exchange(1);  // as a barrier
    LimitTimes times;
    const double begin = Now();
    Loops(codec, numel);
    times.loops_s = Now() - begin;
    Exchange(1);
    const double then = Now(), cpu = ProcessorSeconds(RUSAGE_THREAD);
    Exchange(bytes);
    times.exchange_s = Now() - then;
    times.exchange_cpu_s = ProcessorSeconds(RUSAGE_THREAD) - cpu;
    all.push_back(times);
  }
  arrays_.reset();
  const auto median = [&](double LimitTimes::*part) {
    std::sort(all.begin(), all.end(),
              [part](const LimitTimes& a, const LimitTimes& b) { return a.*part < b.*part; });
    return all[all.size() / 2].*part;
  };
  return {median(&LimitTimes::loops_s), median(&LimitTimes::exchange_s),
          median(&LimitTimes::exchange_cpu_s)};
}

// What schedule/collective/two_hop.cc moves through memory: the foreign shard is encoded, the own
// one reduced, and the foreign one decoded.
void Limit::Loops(const std::string& text, size_t numel) {
  const CodecPair codec = *CodecPair::Parse(text);
  Arrays& a = *arrays_;
  const size_t half = (numel / 2 + 255) / 256 * 256;
  float *const g = a.g.get(), *const r = a.r.get(), *const out = a.out.get();
  uint8_t *const codes = a.codes.get(), *const peer = a.peer.get();
  const int up = codec.up.traits().code_bits, down = codec.down.traits().code_bits;
  if (codec.up.traits().entries()) {
    twin::Accumulate(g, r, numel);
    std::memset(out, 0, numel * sizeof(float));
  } else if (codec.uses_feedback()) {
    twin::EncodeWithFeedback(g, r, codes, half, up);
    twin::Reduce(g + half, peer, r + half, out + half, codes, half, down);
    twin::Decode(peer, out, half, down);
  } else if (up == 32) {  // received in its place
    twin::DecodeAdd(peer, g + half, half, up);
  } else {
    twin::Encode(g, codes, half, up);
    twin::DecodeAdd(peer, out + half, half, up);
    twin::Encode(out + half, codes, half, down);
    twin::Decode(peer, out, half, down);
  }
}

void Limit::Exchange(size_t bytes) {
  static std::vector<uint8_t> from, to;
  from.resize(std::max(from.size(), bytes));
  to.resize(std::max(to.size(), bytes));
  size_t sent = 0, received = 0;
  while (sent < bytes || received < bytes) {
    pollfd ready{socket_,
                 static_cast<short>((sent < bytes ? POLLOUT : 0) | (received < bytes ? POLLIN : 0)),
                 0};
    Check(poll(&ready, 1, 60000) == 1, "poll");
    if ((ready.revents & POLLIN) != 0) {
      const ssize_t got = recv(socket_, to.data() + received, bytes - received, MSG_DONTWAIT);
      Check(got > 0, "recv");
      received += static_cast<size_t>(got);
    }
    if ((ready.revents & POLLOUT) != 0) {
      const ssize_t put =
          send(socket_, from.data() + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      Check(put > 0, "send");
      sent += static_cast<size_t>(put);
    }
  }
}

}  // namespace thinwire
