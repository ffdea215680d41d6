// A library that claims to be NCCL and has no other function.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}
