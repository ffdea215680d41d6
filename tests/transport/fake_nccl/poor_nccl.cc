// A library that says it is NCCL, and has nothing else.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}
