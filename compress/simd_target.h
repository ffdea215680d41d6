// The instruction set that the codecs use on this CPU.
#ifndef THINWIRE_COMPRESS_SIMD_TARGET_H_
#define THINWIRE_COMPRESS_SIMD_TARGET_H_

#include <cstdint>
#include <string>
#include <vector>

namespace thinwire {

// False on a CPU older than any target (x86-64 without SSE4.2 and AES): there the scalar code runs.
bool SimdAvailable();

const char* SimdTargetName();  // "AVX3", "AVX2", ...

// For tests and benchmarks: every target that this build has and this CPU runs, best first, and a
// way to choose one. Not thread-safe; call when no codec runs.
std::vector<std::string> SimdTargets();
void ForceSimdTarget(const std::string& name);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_SIMD_TARGET_H_
