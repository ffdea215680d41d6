/* The parts of nccl.h and cuda_runtime.h that a program needs; the tests have neither header. */
#ifndef THINWIRE_TESTS_INTEGRATIONS_NCCL_PROGRAM_NCCL_H_
#define THINWIRE_TESTS_INTEGRATIONS_NCCL_PROGRAM_NCCL_H_

#include <stddef.h>

typedef struct ncclComm* ncclComm_t;
typedef void* cudaStream_t;
typedef struct {
  char internal[128];
} ncclUniqueId;

enum { ncclSuccess = 0 };
enum { ncclInt32 = 2, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8 };
enum { ncclSum = 0, ncclMax = 2, ncclAvg = 4 };

int ncclGetUniqueId(ncclUniqueId* id);
int ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank);
int ncclCommInitAll(ncclComm_t* comms, int size, const int* devices);
int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, void* config);
int ncclCommCount(ncclComm_t comm, int* size);
int ncclCommUserRank(ncclComm_t comm, int* rank);
int ncclCommDestroy(ncclComm_t comm);
int ncclCommAbort(ncclComm_t comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, ncclComm_t comm,
                  cudaStream_t stream);

/* Functions of the stand-in for a GPU. */
void* standInAllocate(int device, size_t bytes);
void standInFree(int device, void* memory);
cudaStream_t standInStream(int device);
/* Copies in stream order, and waits until that is done. */
void standInCopy(int device, void* to, const void* from, size_t bytes, cudaStream_t stream);

#endif /* THINWIRE_TESTS_INTEGRATIONS_NCCL_PROGRAM_NCCL_H_ */
