// libFuzzer's entry. THINWIRE_FUZZ_TARGET names the target; without it, the names are printed.
// scripts/fuzz.sh runs the targets one after another.
#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/target.h"

namespace {

const thinwire::fuzz::Target* chosen = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* name = std::getenv("THINWIRE_FUZZ_TARGET");
  for (const thinwire::fuzz::Target& target : thinwire::fuzz::Targets()) {
    if (name == nullptr) std::puts(target.name);
    if (name != nullptr && std::string_view(name) == target.name) chosen = &target;
  }
  std::fflush(stdout);
  if (chosen == nullptr) std::_Exit(name == nullptr ? 0 : 2);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thinwire::fuzz::Input input({data, size});
  chosen->run(input);
  return 0;
}
