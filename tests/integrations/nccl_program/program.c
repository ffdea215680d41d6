/* A program that knows nothing of thinwire: three ranks, as threads, reduce over NCCL. It prints
 * for each kind of call how far the results are from the exact ones, and whether all ranks have the
 * same bits; test_nccl_shim.py runs it with the shim and without. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integrations/nccl_program/nccl.h"

enum { kRanks = 3, kCount = 100000, kSteps = 5 };

static ncclUniqueId id;
static ncclComm_t all[kRanks];
static float results[kRanks][kCount];
static pthread_barrier_t barrier;

static void Check(int result, const char* call) {
  if (result == ncclSuccess) return;
  printf("%s failed: %d\n", call, result);
  exit(1);
}

static float ValueOf(int rank, size_t i) {
  return sinf(0.37f * (float)(i % 9973 + 1) * (float)(rank + 1));
}

/* Compares the ranks' results, the mean of which is expected if `mean`, among `ranks` of them. */
static void Report(int rank, const char* what, int ranks, int mean) {
  pthread_barrier_wait(&barrier);
  if (rank == 0) {
    double largest = 0;
    for (size_t i = 0; i < kCount; ++i) {
      double exact = 0;
      for (int r = 0; r < ranks; ++r) exact += ValueOf(r, i);
      if (mean) exact /= ranks;
      largest = fmax(largest, fabs(results[0][i] - exact));
    }
    int alike = 1;
    for (int r = 1; r < ranks; ++r)
      alike &= memcmp(results[r], results[0], sizeof(results[0])) == 0;
    printf("%s: error %.6f, %s\n", what, largest, alike ? "alike" : "different");
  }
  pthread_barrier_wait(&barrier);
}

typedef struct {
  int rank;
  ncclComm_t comm;
  cudaStream_t stream;
  float *host, *in, *out;
} Rank;

static void Reduce(Rank* me, int op, int in_place) {
  for (size_t i = 0; i < kCount; ++i) me->host[i] = ValueOf(me->rank, i);
  float* const out = in_place ? me->in : me->out;
  standInCopy(me->rank, me->in, me->host, kCount * sizeof(float), me->stream);
  Check(ncclAllReduce(me->in, out, kCount, ncclFloat32, op, me->comm, me->stream), "ncclAllReduce");
  standInCopy(me->rank, results[me->rank], out, kCount * sizeof(float), me->stream);
}

static void* Run(void* argument) {
  Rank me = {.rank = (int)(intptr_t)argument};
  const size_t bytes = kCount * sizeof(float);
  me.stream = standInStream(me.rank);
  me.host = malloc(bytes);
  me.in = standInAllocate(me.rank, bytes);
  me.out = standInAllocate(me.rank, bytes);
  Check(ncclCommInitRank(&me.comm, kRanks, id, me.rank), "ncclCommInitRank");
  int size = 0, rank = -1;
  Check(ncclCommCount(me.comm, &size), "ncclCommCount");
  Check(ncclCommUserRank(me.comm, &rank), "ncclCommUserRank");
  if (size != kRanks || rank != me.rank) exit(1);

  for (int step = 0; step < kSteps; ++step) Reduce(&me, ncclSum, 1);
  Report(me.rank, "sum in place", kRanks, 0);
  Reduce(&me, ncclAvg, 0);
  Report(me.rank, "mean", kRanks, 1);

  Check(ncclGroupStart(), "ncclGroupStart");
  for (size_t i = 0; i < kCount; ++i) me.host[i] = ValueOf(me.rank, i);
  standInCopy(me.rank, me.in, me.host, bytes, me.stream);
  Check(ncclAllReduce(me.in, me.in, kCount, ncclFloat32, ncclSum, me.comm, me.stream), "grouped");
  Check(ncclGroupEnd(), "ncclGroupEnd");
  standInCopy(me.rank, results[me.rank], me.in, bytes, me.stream);
  Report(me.rank, "grouped sum", kRanks, 0);

  int32_t one = me.rank + 1;
  standInCopy(me.rank, me.in, &one, sizeof(one), me.stream);
  Check(ncclAllReduce(me.in, me.in, 1, ncclInt32, ncclMax, me.comm, me.stream), "maximum");
  standInCopy(me.rank, &one, me.in, sizeof(one), me.stream);
  if (one != kRanks) exit(1);

  ncclComm_t part = NULL, whole = me.comm;
  Check(ncclCommSplit(whole, 0, me.rank, &part, NULL), "ncclCommSplit");
  me.comm = part;
  Reduce(&me, ncclSum, 1);
  Report(me.rank, "sum of a split communicator", kRanks, 0);
  Check(ncclCommAbort(part), "ncclCommAbort");
  me.comm = all[me.rank];
  Reduce(&me, ncclSum, 1);
  Report(me.rank, "sum of ncclCommInitAll's", kRanks, 0);
  Check(ncclCommDestroy(all[me.rank]), "ncclCommDestroy");
  Check(ncclCommDestroy(whole), "ncclCommDestroy");
  standInFree(me.rank, me.in);
  standInFree(me.rank, me.out);
  free(me.host);
  return NULL;
}

int main(void) {
  pthread_t threads[kRanks];
  pthread_barrier_init(&barrier, NULL, kRanks);
  Check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  const int devices[kRanks] = {0, 1, 2};
  Check(ncclCommInitAll(all, kRanks, devices), "ncclCommInitAll");
  for (intptr_t r = 0; r < kRanks; ++r) pthread_create(&threads[r], NULL, Run, (void*)r);
  for (int r = 0; r < kRanks; ++r) pthread_join(threads[r], NULL);
  puts("done");
  return 0;
}
