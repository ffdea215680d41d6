#include "tests/integrations/old_caller.h"

#include <stdlib.h>
#include <string.h>

#include "tests/integrations/old_options.h"

/* As the first release declared them; the library exports these names still. */
typedef struct tw_comm tw_comm;
typedef struct tw_work tw_work;
extern void tw_options_init(tw_options* options);
extern int tw_comm_create(const tw_options* options, tw_comm** comm);
extern void tw_comm_destroy(tw_comm* comm);
extern int tw_all_reduce_async(const void* send, void* recv, size_t count, int dtype, int op,
                               tw_comm* comm, void* stream, const char* name, int priority,
                               tw_work** work);
extern int tw_wait(tw_work* work);
extern int tw_simulate(const tw_simulation* simulation, double* step_s, double* bound_s);

/* Memory of exactly the old size, so that the address sanitizer sees every byte beyond it. What it
 * holds before tw_options_init must not matter. */
static tw_options* NewOptions(void) {
  tw_options* options = malloc(sizeof(tw_options));
  memset(options, 0xff, sizeof(*options));
  tw_options_init(options);
  return options;
}

int OldCallerAllReduce(int rank, const char* group, const char* trace_path, float* values,
                       size_t count) {
  tw_options* options = NewOptions();
  options->rank = rank;
  options->size = 2;
  options->local_group = group;
  options->codec = "int8";
  options->momentum = 0.5f;
  options->policy = "fifo";
  options->lanes = 3;
  options->chunk_bytes = 8192;
  options->no_raw = 1;
  options->timeout_ms = 10000;
  options->trace_path = trace_path;
  tw_comm* comm = NULL;
  int status = tw_comm_create(options, &comm);
  free(options);
  if (status != 0) return status;
  tw_work* work = NULL;
  status = tw_all_reduce_async(values, values, count, 0, 0, comm, NULL, "w", 0, &work);
  if (status == 0) status = tw_wait(work);
  tw_comm_destroy(comm);
  return status;
}

int OldCallerSimulate(double* step_s) {
  tw_options* options = NewOptions();
  options->size = 2;
  options->codec = "int4";
  options->policy = "p3";
  const tw_layer layers[] = {{1000000, 0.001, 0.002}, {3000000, 0.001, 0.002}};
  tw_simulation* simulation = calloc(1, sizeof(tw_simulation));
  simulation->struct_size = sizeof(*simulation);
  simulation->options = options;
  simulation->layers = layers;
  simulation->num_layers = 2;
  simulation->bytes_per_s = 1e8;
  simulation->latency_s = 1e-4;
  simulation->steps = 2;
  const int status = tw_simulate(simulation, step_s, NULL);
  free(simulation);
  free(options);
  return status;
}
