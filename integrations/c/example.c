/* tw_all_reduce in place of ncclAllReduce; the line marked "before" is the call that it replaces.
 *
 *   at=$(mktemp -d); for r in 0 1; do build/integrations/c/c_example $r 2 $at & done; wait
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "integrations/c/thinwire.h"

enum { kCount = 1 << 20 };

static int Check(tw_status status, const char* call) {
  if (status == TW_OK) return 0;
  fprintf(stderr, "%s: %s\n", call, tw_last_error());
  return 1;
}

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s RANK SIZE FOLDER\n", argv[0]);
    return 2;
  }
  tw_options options;
  tw_options_init(&options);
  options.rank = atoi(argv[1]);
  options.size = atoi(argv[2]);
  options.store_path = argv[3];
  options.codec = "int8";

  tw_comm* comm = NULL;
  if (Check(tw_comm_create(&options, &comm), "tw_comm_create")) return 1;

  float* gradient = malloc(kCount * sizeof(float));
  for (int i = 0; i < kCount; ++i) gradient[i] = (float)(options.rank + 1) * sinf((float)i);

  /* before: ncclAllReduce(gradient, gradient, kCount, ncclFloat, ncclAvg, comm, stream);   */
  int failed = Check(tw_all_reduce(gradient, gradient, kCount, TW_F32, TW_MEAN, comm, NULL),
                     "tw_all_reduce");

  float worst = 0; /* the mean over ranks of (rank + 1) sin(i) */
  for (int i = 0; i < kCount; ++i) {
    const float error = fabsf(gradient[i] - 0.5f * (float)(options.size + 1) * sinf((float)i));
    if (error > worst) worst = error;
  }
  tw_stats stats;
  failed |= Check(tw_comm_stats(comm, &stats), "tw_comm_stats");
  printf("rank %d: worst error %.4f, %.2f times fewer bytes than fp32\n", options.rank, worst,
         (double)stats.raw_bytes / (double)stats.wire_bytes);
  tw_comm_destroy(comm);
  free(gradient);
  return failed || worst > 0.02f * (float)options.size;
}
