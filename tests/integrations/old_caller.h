/* A program compiled against the first release's header, as functions for a test. */
#ifndef THINWIRE_TESTS_INTEGRATIONS_OLD_CALLER_H_
#define THINWIRE_TESTS_INTEGRATIONS_OLD_CALLER_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs one rank of two that meet under the name `group`: int8, 3 lanes, chunks of 8192 bytes, all
 * tensors compressed, a momentum of 0.5, a trace. Replaces `values` by the result of a named
 * allreduce. Returns the first status that is not 0. */
int OldCallerAllReduce(int rank, const char* group, const char* trace_path, float* values,
                       size_t count);

/* Simulates a step of two ranks with int4 and p3. Returns the status. */
int OldCallerSimulate(double* step_s);

#ifdef __cplusplus
}
#endif

#endif /* THINWIRE_TESTS_INTEGRATIONS_OLD_CALLER_H_ */
