#include "transport/nccl/nccl_library.h"

#include <link.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "transport/shared_library.h"

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

std::string WheelCopy() {
  const auto packages = WheelPackages();
  if (packages.empty()) return "";
  const auto file = packages / "nvidia" / "nccl" / "lib" / kFileName;
  std::error_code unknown;
  return std::filesystem::is_regular_file(file, unknown) ? file.string() : "";
}

bool IsSameFile(const std::string& one, const std::string& other) {
  std::error_code unknown;
  return std::filesystem::equivalent(one, other, unknown);
}

// The library to load, in the order of nccl_library.h.
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

// 23007 is 2.30.7; up to 2.8 three digits follow the first number.
std::string VersionText(int code) {
  return code < 10000 ? absl::StrCat(code / 1000, ".", code % 1000 / 100, ".", code % 100)
                      : absl::StrCat(code / 10000, ".", code % 10000 / 100, ".", code % 100);
}

void FindAll(FunctionFinder& find, NcclLibrary* nccl) {
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
}

void FindRegistration(void* handle, NcclLibrary* nccl) {
  FunctionFinder find(handle);
  find("ncclMemAlloc", &nccl->mem_alloc);
  find("ncclMemFree", &nccl->mem_free);
  find("ncclCommRegister", &nccl->comm_register);
  find("ncclCommDeregister", &nccl->comm_deregister);
  if (!find.missing().empty()) nccl->mem_alloc = nullptr;
}

}  // namespace

// Finds it in whatever folder it is.
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
  void* const handle = OpenLibrary(*chosen);
  if (handle == nullptr) return Unusable(*chosen, WhyNotLoaded(*chosen));
  NcclResult (*get_version)(int*);
  FunctionFinder find(handle);
  find("ncclGetVersion", &get_version);
  if (!find.missing().empty()) return Unusable(*chosen, absl::StrCat("it has no ", find.missing()));
  int version = 0;
  get_version(&version);
  auto nccl = std::make_shared<NcclLibrary>();
  nccl->version = VersionText(version);
  nccl->path = *chosen;
  if (version < kNcclOldest || version >= 30000) {
    return Unusable(*chosen, absl::StrCat("its version is ", nccl->version,
                                          ", expected 2.18 or a newer one of 2"));
  }
  FindAll(find, nccl.get());
  if (!find.missing().empty()) {
    return Unusable(*chosen, absl::StrCat("it has no ", find.missing()));
  }
  FindRegistration(handle, nccl.get());
  return nccl;
}

}  // namespace thinwire
