#include "transport/nccl/nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr char kFileName[] = "libnccl.so.2";
constexpr char kMend[] =
    "install the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13 or the system's libnccl2, name the "
    "file "
    "in THINWIRE_NCCL_LIB, or set transport to gloo";

absl::Status Unusable(const std::string& path, const std::string& why) {
  return absl::UnimplementedError(
      absl::StrCat("NCCL can't be used: ", path, ": ", why, "; ", kMend));
}

// Packages are neighbours: this function's library is in thinwire/lib, NCCL's in nvidia/nccl/lib.
std::string WheelCopy() {
  Dl_info here;
  if (dladdr(reinterpret_cast<const void*>(&WheelCopy), &here) == 0) return "";
  const auto packages = std::filesystem::path(here.dli_fname).parent_path() / ".." / "..";
  const auto file = packages / "nvidia" / "nccl" / "lib" / kFileName;
  std::error_code unknown;
  return std::filesystem::is_regular_file(file, unknown) ? file.string() : "";
}

bool IsSameFile(const std::string& one, const std::string& other) {
  std::error_code unknown;
  return std::filesystem::equivalent(one, other, unknown);
}

// What to load, in the order of nccl_library.h.
absl::StatusOr<std::string> Choose(const std::string& named) {
  const std::string loaded = LoadedNccl();
  if (!named.empty()) {
    if (loaded.empty() || IsSameFile(named, loaded)) return named;
    return Unusable(named, absl::StrCat("this process has loaded ", loaded,
                                        " already, and two copies of NCCL do not go together; "
                                        "unset THINWIRE_NCCL_LIB, or name that file"));
  }
  if (!loaded.empty()) return loaded;
  const std::string wheel = WheelCopy();
  return wheel.empty() ? kFileName : wheel;
}

// 23007 is 2.30.7; up to 2.8 the first number had three digits after it.
std::string VersionText(int code) {
  return code < 10000 ? absl::StrCat(code / 1000, ".", code % 1000 / 100, ".", code % 100)
                      : absl::StrCat(code / 10000, ".", code % 10000 / 100, ".", code % 100);
}

template <typename Function>
void Find(void* handle, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  if (*function == nullptr) *missing = name;
}

// The name of a function that the library lacks, or nothing.
std::string FindAll(void* handle, NcclLibrary* nccl) {
  std::string missing;
  const auto find = [&](const char* name, auto* function) {
    Find(handle, name, function, &missing);
  };
  find("ncclGetErrorString", &nccl->get_error_string);
  find("ncclGetLastError", &nccl->get_last_error);
  find("ncclGetUniqueId", &nccl->get_unique_id);
  find("ncclCommInitRankConfig", &nccl->comm_init_rank_config);
  find("ncclCommFinalize", &nccl->comm_finalize);
  find("ncclCommDestroy", &nccl->comm_destroy);
  find("ncclCommAbort", &nccl->comm_abort);
  find("ncclCommGetAsyncError", &nccl->comm_get_async_error);
  find("ncclGroupStart", &nccl->group_start);
  find("ncclGroupEnd", &nccl->group_end);
  find("ncclSend", &nccl->send);
  find("ncclRecv", &nccl->recv);
  find("ncclAllGather", &nccl->all_gather);
  return missing;
}

void FindRegistration(void* handle, NcclLibrary* nccl) {
  std::string missing;
  Find(handle, "ncclMemAlloc", &nccl->mem_alloc, &missing);
  Find(handle, "ncclMemFree", &nccl->mem_free, &missing);
  Find(handle, "ncclCommRegister", &nccl->comm_register, &missing);
  Find(handle, "ncclCommDeregister", &nccl->comm_deregister, &missing);
  if (!missing.empty()) nccl->mem_alloc = nullptr;
}

}  // namespace

// Whatever folder it is in.
std::string LoadedNccl() {
  std::string loaded;
  const auto look = [](dl_phdr_info* info, size_t, void* found) {
    const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    if (!absl::StartsWith(std::filesystem::path(path).filename().string(), "libnccl.so")) return 0;
    *static_cast<std::string*>(found) = path;
    return 1;
  };
  dl_iterate_phdr(look, &loaded);
  return loaded;
}

absl::StatusOr<std::shared_ptr<const NcclLibrary>> LoadNccl(const std::string& path) {
  const absl::StatusOr<std::string> chosen = Choose(path);
  if (!chosen.ok()) return chosen.status();
  void* const handle = dlopen(chosen->c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return Unusable(*chosen, dlerror());
  NcclResult (*get_version)(int*);
  std::string missing;
  Find(handle, "ncclGetVersion", &get_version, &missing);
  if (!missing.empty()) return Unusable(*chosen, absl::StrCat("it has no ", missing));
  int version = 0;
  get_version(&version);
  auto nccl = std::make_shared<NcclLibrary>();
  nccl->version = VersionText(version);
  nccl->path = *chosen;
  if (version < kNcclOldest || version >= 30000) {
    return Unusable(*chosen, absl::StrCat("its version is ", nccl->version,
                                          ", expected 2.18 or a newer one of 2"));
  }
  if (missing = FindAll(handle, nccl.get()); !missing.empty()) {
    return Unusable(*chosen, absl::StrCat("it has no ", missing));
  }
  FindRegistration(handle, nccl.get());
  return nccl;
}

}  // namespace thinwire
