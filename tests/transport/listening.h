// Lists the sockets that this process listens on, from /proc.
#ifndef THINWIRE_TESTS_TRANSPORT_LISTENING_H_
#define THINWIRE_TESTS_TRANSPORT_LISTENING_H_

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace thinwire {

struct ListeningSocket {
  std::string address;  // hexadecimal, in memory order
  int port = 0;
};

inline std::vector<ListeningSocket> ListeningSockets() {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    own.insert(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  std::vector<ListeningSocket> found;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, skip, inode;
      fields >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) fields >> skip;
      fields >> inode;
      if (state != "0A" || !own.contains("socket:[" + inode + "]")) continue;
      const size_t colon = local.find(':');
      found.push_back({local.substr(0, colon), std::stoi(local.substr(colon + 1), nullptr, 16)});
    }
  }
  return found;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_LISTENING_H_
