/* thinwire: compressed allreduce of gradients. The C interface of libthinwire.so.
 *
 * Every function returns a tw_status; tw_last_error() has the message of the calling thread's last
 * failure: rank, tensor, what was expected, what came, and the fix. No function throws, aborts the
 * process, or waits past the deadline. All are thread-safe, but for destroying what is in use.
 *
 * A communicator, with its works and buckets, and a store belong to the process that made them. In
 * a forked child every call on them returns TW_INVALID_ARGUMENT at once, and destroying them does
 * nothing.
 */
#ifndef THINWIRE_INTEGRATIONS_C_THINWIRE_H_
#define THINWIRE_INTEGRATIONS_C_THINWIRE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TW_API __attribute__((visibility("default")))
#else
#define TW_API
#endif

typedef enum {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1, /* bad input, seen before anything was sent */
  TW_MISMATCH = 2,         /* ranks disagree: codec, world, tensor, size, order, version */
  TW_TIMEOUT = 3,          /* a deadline passed */
  TW_PEER_LOST = 4,        /* a rank died or closed its connections */
  TW_UNAVAILABLE = 5,      /* this build or machine lacks a part */
  TW_ABORTED = 6,          /* tw_comm_abort, or the communicator was destroyed */
  TW_INTERNAL = 7,         /* our own fault */
  TW_DATA_LOSS = 8,        /* bytes of a peer, which tw_options.checksum finds out, or of a store's
                              journal came damaged */
  TW_OUT_OF_MEMORY = 9     /* a device, pinned memory or the host's is full, or this process may
                              start no more threads */
} tw_status;

/* The last value of each makes every int a valid one, so that a wrong one is an error, no more. */
typedef enum { TW_F32 = 0, TW_BF16 = 1, TW_F16 = 2, TW_DTYPE_IS_INT = 0x7fffffff } tw_dtype;
typedef enum { TW_MEAN = 0, TW_SUM = 1, TW_OP_IS_INT = 0x7fffffff } tw_op;

typedef struct tw_comm tw_comm;     /* one process group */
typedef struct tw_work tw_work;     /* one allreduce in flight */
typedef struct tw_bucket tw_bucket; /* a tensor that is described once and reduced in every step */

/* Where ranks find each other. Both return 0, or another number on failure. */
typedef struct {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t bytes);
  /* Waits up to timeout_ms for the key; writes at most `capacity` bytes and the value's size. */
  int (*get)(void* context, const char* key, void* value, size_t capacity, size_t* bytes,
             int timeout_ms);
} tw_store;

/* Zero means the default for every field but rank, size and the store. Call tw_options_init.
 * docs/reference/settings.md has each field's default, and says which must be equal on all ranks.
 *
 * A program that was compiled against an older, shorter struct keeps working: it says so in
 * struct_size, and the fields that it lacks have their defaults. Therefore a field never moves,
 * a new one goes to the end, and it takes 8 bytes, so that no padding is ever read as a field. */
typedef struct {
  size_t struct_size; /* sizeof(tw_options) */
  int rank, size;
  tw_store store;              /* used if store.set is not null, else store_path */
  const char* local_group;     /* else: all ranks are communicators of this process, made on a
                                  thread each, which meet under this name */
  const char* store_path;      /* else: a folder that all ranks share */
  const char* group;           /* key prefix, so that groups can share a store */
  const char* device;          /* "cpu" (default), "cuda" or "cuda:1": where all tensors lie */
  const char* cuda_library;    /* path of libthinwire_cuda.so; null: beside libthinwire.so */
  const char* codec;           /* "int4"; several, separated by ';', for tw_segment.codec */
  float momentum;              /* of SGD, owned by the communicator: means are momentum then */
  int nesterov;                /* non-zero: results are Nesterov steps */
  const char* policy;          /* "wfbp" (default), "fifo" or "p3" (lowest priority first) */
  int planned;                 /* the order of steps (tw_comm_end_step) is predicted above a
                                  millisecond of latency (0), always (above 0), never (below 0) */
  const char* interface_name;  /* network interface to listen on */
  const char* rendezvous_host; /* listen where this host is reached; else loopback */
  int lanes;                   /* chunks in flight */
  size_t chunk_bytes;     /* of fp32 input; unless set, 4 MiB, over NCCL 32 MiB, under p3 1 MiB,
                             and larger in large worlds */
  size_t min_bytes;       /* smaller tensors go raw; SIZE_MAX: everything raw */
  int no_raw;             /* non-zero: small tensors are compressed as well */
  int timeout_ms;         /* of connecting, and of one allreduce */
  const char* trace_path; /* Chrome trace, written when the communicator is destroyed */
  /* The first release ended here. */
  const char* flight_path; /* the engine's last events are written here with its first failure */
  const char* key_file;    /* secret of the group, in a file of mode 0600 that every rank has; null
                              on every rank: a random token in the store */
  size_t checksum;         /* non-zero: a CRC32C goes with all that tensors send, and is checked */
  const char* topology;  /* of dense allreduces: "flat", from each rank to all others; "grid", along
                            the rows and columns of a grid; "hierarchical", uncompressed inside
                            nodes and compressed between them; "auto" (default): the last where
                            the links inside are measured to be faster, else a grid from 64 ranks
                            on, else flat */
  size_t recoverable;    /* non-zero: tw_residual_undo works, at the price of as much memory again
                            as residuals and momentum take */
  size_t check_replicas; /* reserved: 0; tw_digest compares parameters, as the ranks' caller asks */
  const char* transport; /* of the data: "gloo" (default); "ucx": shared memory of one host, which
                            all ranks must be on; "nccl": ranks with GPUs of their own; "auto":
                            "nccl" if all ranks can, else "ucx", else "gloo" */
  const char* ucx_library;  /* path of libucp.so.0; null: where the dynamic linker looks */
  const char* nccl_library; /* path of libnccl.so.2; null: the copy that is loaded, else the wheel's
                               beside the package, else where the dynamic linker looks */
  size_t local_size; /* ranks of a node, which are neighbours; 0: those on one running kernel and in
                        one network namespace */
  const char* congestion; /* TCP's congestion control of the connections: the kernel's name of one;
                             "system" (default): what the kernel gives every connection */
  size_t loops; /* threads that move the bytes over TCP, each with connections of its own to all
                   ranks; 0: 1; 16 at most */
} tw_options;

TW_API const char* tw_version(void);    /* "0.1.0" */
TW_API const char* tw_last_error(void); /* of this thread; valid until its next failure */

/* Fills a struct of struct_size bytes with defaults. tw_options_init passes the size of the struct
 * that its caller was compiled with. The function behind the macro's name serves programs that
 * were compiled against the first release, and writes no more than that release's fields. */
TW_API void tw_options_init_sized(tw_options* options, size_t struct_size);
TW_API void tw_options_init(tw_options* options);
#define tw_options_init(options) tw_options_init_sized((options), sizeof(tw_options))

TW_API tw_status tw_comm_create(const tw_options* options, tw_comm** comm);
TW_API tw_status tw_comm_abort(tw_comm* comm); /* fails the group on every rank */
/* As tw_comm_abort, for the caller's own reason: from here on every rank's calls return `status`
 * (any but TW_OK) with a message that holds `reason`, unless the group had failed before. */
TW_API tw_status tw_comm_fail(tw_comm* comm, tw_status status, const char* reason);
TW_API void tw_comm_destroy(tw_comm* comm); /* after all its works are freed */

/* In place if send == recv; they may not overlap otherwise. `count` elements, at most 2^36 as in
 * all calls. On a device `stream` is a cudaStream_t, null the default one: its work so far makes
 * the input, and its later work may use the output as soon as this returns. On the host it must be
 * null. */
TW_API tw_status tw_all_reduce(const void* send, void* recv, size_t count, tw_dtype dtype, tw_op op,
                               tw_comm* comm, void* stream);

/* The two halves of an allreduce, with n ranks. tw_reduce_scatter: `send` has n * recv_count
 * elements, and each rank gets its own recv_count of the mean or sum. tw_all_gather: every rank
 * gets n * send_count elements, those of all ranks in rank order, with the same bits everywhere.
 * `send` and `recv` may not overlap, but where recv == send + rank * recv_count, or, in
 * tw_all_gather, send == recv + rank * send_count. Every size goes compressed; not with topk. */
TW_API tw_status tw_reduce_scatter(const void* send, void* recv, size_t recv_count, tw_dtype dtype,
                                   tw_op op, tw_comm* comm, void* stream);
TW_API tw_status tw_all_gather(const void* send, void* recv, size_t send_count, tw_dtype dtype,
                               tw_comm* comm, void* stream);

/* `name`: equal on all ranks; it carries the error feedback from call to call. Null: none. */
TW_API tw_status tw_all_reduce_async(const void* send, void* recv, size_t count, tw_dtype dtype,
                                     tw_op op, tw_comm* comm, void* stream, const char* name,
                                     int priority, tw_work** work);

/* Elements [offset, offset + count) of parameter `name` (of `total` elements), which go with codec
 * number `codec` of options.codec, from 0; the segments of a bucket follow one another and add up
 * to its count. `absent`, which ranks and calls may differ in: non-zero where this rank has no
 * gradient for it. Its elements must be zeros then, and what compression has kept of it stays. */
typedef struct {
  const char* name;
  size_t offset, count, total;
  size_t codec;
  int absent;
} tw_segment;
TW_API tw_status tw_all_reduce_segments(const void* send, void* recv, size_t count, tw_dtype dtype,
                                        tw_op op, tw_comm* comm, void* stream, const char* name,
                                        int priority, const tw_segment* segments,
                                        size_t num_segments, tw_work** work);

/* Waits, frees the work, returns its status. On a device the result is there for later work of the
 * stream that the call was made with, or of the one named here. The async calls themselves never
 * wait for a device, but where a name's layout is new. */
TW_API tw_status tw_wait(tw_work* work);
TW_API tw_status tw_wait_stream(tw_work* work, void* stream);
/* For a caller who wants no status: waits and frees, and leaves tw_last_error as it is. */
TW_API void tw_work_destroy(tw_work* work);

typedef enum {
  TW_ALL_REDUCE = 0,
  TW_REDUCE_SCATTER = 1,
  TW_ALL_GATHER = 2,
  TW_ALL_TO_ALL = 3, /* part r of `send` goes to rank r, verbatim, and comes from it in its place of
                        `recv`, which has as many elements and is other memory */
  TW_COLLECTIVE_IS_INT = 0x7fffffff
} tw_collective;

/* A bucket as it is in every step. The caller sets struct_size; zero is a default elsewhere. */
typedef struct {
  size_t struct_size; /* sizeof(tw_bucket_info) */
  const char* name;   /* as in tw_all_reduce_async */
  size_t count; /* elements of `send`; a multiple of the ranks in a reduce-scatter or all-to-all */
  tw_dtype dtype;
  tw_op op; /* an all-gather and an all-to-all ignore it */
  tw_collective collective;
  int priority;
  const tw_segment* segments; /* null: none; their `absent` is ignored */
  size_t num_segments;
  const char* shape; /* in the caller's words, such as "10x100": ranks with other words fail with
                        TW_MISMATCH. Null: only the count is compared */
} tw_bucket_info;

/* The description is read once and not kept. A name may be described anew: what compression has
 * kept moves to the description that is started next. */
TW_API tw_status tw_bucket_create(tw_comm* comm, const tw_bucket_info* info, tw_bucket** bucket);

/* Starts one use of the bucket and returns; it parses no names and allocates nothing after the
 * first use, but for small tensors, which go at once. `absent`: numbers of the segments that this
 * rank has no gradient for, as in tw_segment. One thread at a time uses a bucket. */
TW_API tw_status tw_bucket_start(tw_bucket* bucket, const void* send, void* recv, void* stream,
                                 const uint32_t* absent, size_t num_absent);
/* As tw_bucket_start, with a divisor of this use's mean in place of the number of ranks: the sum of
 * the ranks' weights, where each has multiplied its elements by its own, or the number of ranks
 * that take part, where the others send zeros. Equal on all ranks (else TW_MISMATCH), finite and
 * above 0; 0: the number of ranks. For TW_MEAN, without tw_options.momentum. */
TW_API tw_status tw_bucket_start_divided(tw_bucket* bucket, const void* send, void* recv,
                                         void* stream, const uint32_t* absent, size_t num_absent,
                                         float divisor);
/* Waits for the use that was started, as tw_wait and tw_wait_stream do. */
TW_API tw_status tw_bucket_wait(tw_bucket* bucket);
TW_API tw_status tw_bucket_wait_stream(tw_bucket* bucket, void* stream);
/* After its last wait; the communicator may be gone already. */
TW_API void tw_bucket_destroy(tw_bucket* bucket);

/* Who waits for whom, and the engine's last events, as text. Writes at most `capacity` bytes, the
 * final NUL included; *bytes is the size that all of it takes. At any time, from any thread. */
TW_API tw_status tw_comm_describe(tw_comm* comm, char* text, size_t capacity, size_t* bytes);

/* 64 bits of `bytes` bytes, the same on every rank and build: schedule/hash.h. */
TW_API uint64_t tw_digest(const void* data, size_t bytes);

/* One shard of compress/FORMAT.md, of the first hop's codec if the spec has two. `residual` may be
 * null; else n floats, updated in place. A malformed shard is TW_INVALID_ARGUMENT. */
TW_API tw_status tw_encoded_bytes(const char* spec, size_t n, size_t* bytes);
TW_API tw_status tw_encode(const char* spec, const float* x, size_t n, float* residual, void* out,
                           size_t capacity, size_t* bytes);
TW_API tw_status tw_decode(const char* spec, const void* in, size_t bytes, float* x, size_t n);
/* The mean of what `count` members sent: x = factors[0] * in[0] + factors[1] * in[1] ... decoded,
 * each product and each sum rounded to fp32, in this order. in[m] has `bytes` bytes: shards of
 * `shard` elements, the last one maybe shorter, one after another. To the 2 * count + 1 `products`
 * are added the sum of squares of each in[m], the inner product of each in[m] and x, and the sum of
 * squares of x, in fp64 and the same on every CPU. A malformed shard leaves any values in x. */
TW_API tw_status tw_decode_mean(const char* spec, const void* const* in, size_t bytes,
                                const float* factors, size_t count, size_t shard, float* x,
                                size_t n, double* products);

/* How much a codec's accuracy depends on compressing the momentum (tw_options.momentum) in place of
 * the gradient. */
typedef enum {
  TW_MOMENTUM_UNUSED = 0,  /* the bare gradient does as well */
  TW_MOMENTUM_HELPS = 1,   /* the momentum does better */
  TW_MOMENTUM_ADVISED = 2, /* the bare gradient loses accuracy */
  TW_MOMENTUM_REQUIRED = 3 /* the bare gradient diverges */
} tw_momentum_need;

/* A codec and a spec of it. The caller sets struct_size and no other field; pointers are to strings
 * that live as long as the library. */
typedef struct {
  size_t struct_size;        /* sizeof(tw_codec) */
  const char* name;          /* of the first hop's codec: "int4" */
  const char* help;          /* one sentence about it */
  char spec[256];            /* the canonical spec of both hops */
  char up[128], down[128];   /* the canonical spec of each hop; equal where there is one hop */
  double up_bits, down_bits; /* of one element of a large shard, scales included */
  int entries;               /* non-zero: every rank gets all entries, and there is no second hop */
  int uses_feedback;         /* non-zero: what a step loses is kept for the next one */
  int has_kernels;           /* non-zero: it runs on devices, not only on the CPU */
  tw_momentum_need momentum; /* the stronger need of the two hops */
  size_t num_parameters;     /* of the first hop's codec; down=SPEC is not counted */
} tw_codec;

/* A parameter of a spec's first hop. Of the fields the caller sets struct_size. */
typedef struct {
  size_t struct_size;     /* sizeof(tw_parameter) */
  const char* key;        /* "block" */
  const char* range;      /* "a power of two from 128 to 4096" */
  const char* help;       /* one sentence */
  char default_value[64]; /* "256" */
  char value[64];         /* the one that the spec has */
} tw_parameter;

/* The name of codec number `index`, from 0; null behind the last one. */
TW_API const char* tw_codec_name(size_t index);
TW_API tw_status tw_codec_info(const char* spec, tw_codec* codec);
TW_API tw_status tw_codec_parameter(const char* spec, size_t index, tw_parameter* parameter);

/* This struct does not know its size, so it never grows: new counters get a new function. The same
 * goes for tw_store, which lies inside tw_options, and for tw_segment and tw_layer, of which
 * callers make arrays. */
typedef struct {
  uint64_t all_reduces, raw_bytes, wire_bytes; /* raw: fp32 ring's bytes; wire: sent by this rank */
  uint64_t planned_chunks;                     /* whose order was predicted */
  double queue_s, encode_s, exchange_s, reduce_s, gather_s, decode_s;
} tw_stats;
TW_API tw_status tw_comm_stats(tw_comm* comm, tw_stats* stats);

/* The spec that codec `index` of options.codec became: topk is int4 if that costs fewer bytes. */
TW_API tw_status tw_comm_codec(tw_comm* comm, size_t index, char* spec, size_t capacity);

/* What the data runs on, such as "gloo over TCP", "ucx 1.13.1 over shared memory" or "nccl 2.30.7".
 */
TW_API tw_status tw_comm_transport(tw_comm* comm, char* text, size_t capacity);

/* 1 if the ranks' exchanges match by their order, as NCCL's do: all chunks start in one order on
 * all ranks, so one that does not come holds all behind it. 0 if they match by tag. */
TW_API tw_status tw_comm_matches_by_order(tw_comm* comm, int* by_order);

/* The way that dense allreduces go, and why, such as "flat, all ranks are on one node"
 * or "hierarchical: 2 nodes of 2 ranks, each rank sends 812 MB/s inside nodes of 2 and ...". */
TW_API tw_status tw_comm_topology(tw_comm* comm, char* text, size_t capacity);

/* What the group has measured of its nodes: the ranks of one, and the bytes a second that each rank
 * sends inside a node and between nodes while all ranks send. Zeros where it has measured nothing:
 * its topology is not "auto", or it has no nodes. */
typedef struct {
  size_t local_size;
  double inside_bytes_per_s, between_bytes_per_s;
} tw_nodes;
TW_API tw_status tw_comm_nodes(tw_comm* comm, tw_nodes* nodes);

/* The version of UCX that would be used; `library` as in tw_options.ucx_library. TW_UNAVAILABLE
 * says why there is none. */
TW_API tw_status tw_ucx_version(const char* library, char* text, size_t capacity);

/* The same of NCCL; `library` as in tw_options.nccl_library. Asking loads it. */
TW_API tw_status tw_nccl_version(const char* library, char* text, size_t capacity);

/* Whether a tensor of that size goes uncompressed, because it is small. */
TW_API tw_status tw_comm_goes_raw(tw_comm* comm, size_t count, tw_dtype dtype, int* raw);

/* The step that the next allreduce of every name is, from 0: topk's warm-up and stochastic rounding
 * go by it. To be set on all ranks alike, when a run is resumed. */
TW_API tw_status tw_comm_set_step(tw_comm* comm, uint64_t step);

/* All of a training step has been submitted on this rank, and the next step will submit the same
 * named tensors. Their order may then be predicted (tw_options.planned), which spares each chunk an
 * announcement. A tensor that the next step lacks after all costs time. Where transports match by
 * order (NCCL) it fails the group, and a step that waits for a tensor before it submits another
 * one, where this step did not wait, may time out. To be called on every rank; rank 0's call
 * counts. */
TW_API tw_status tw_comm_end_step(tw_comm* comm);

/* All of a training step has been submitted on this rank, and the next step may submit other
 * tensors: in place of tw_comm_end_step. Nothing is predicted from this step. */
TW_API tw_status tw_comm_forget_step(tw_comm* comm);

/* All that is kept of each parameter, while no allreduce is in flight: first-hop and second-hop
 * residuals, and the momentum if the communicator owns one; numel floats each. `index` counts
 * parameters in name order. `momentum` may be null: not asked for, or none to be set. */
TW_API tw_status tw_residual_count(tw_comm* comm, size_t* count);
TW_API tw_status tw_residual_info(tw_comm* comm, size_t index, char* name, size_t capacity,
                                  size_t* numel);
TW_API tw_status tw_residual_get(tw_comm* comm, const char* name, float* first, float* second,
                                 float* momentum, size_t numel);
/* After a failure: takes back what the last use of every tensor has changed in them, half done or
 * done. tw_residual_get before and after it gives both states, of which the ranks choose the one
 * that they agree on: docs/how-to/recover.md. */
TW_API tw_status tw_residual_undo(tw_comm* comm);
TW_API tw_status tw_residual_set(tw_comm* comm, const char* name, const float* first,
                                 const float* second, const float* momentum, size_t numel);
/* Any arrays of any parameters in one call, which reads the memory of a bucket once for all of its
 * parameters: get writes `values`, set reads them. An array that is not kept is zeros. set replaces
 * all that is kept of the parameters that are named: an array of theirs that is not among these
 * becomes zeros. TW_INVALID_ARGUMENT for a parameter that get does not know, or for another number
 * of elements; then nothing is written. tw_residual_array does not know its size, so it never
 * grows. */
typedef struct {
  const char* parameter;
  const char* array; /* "first", "second", "momentum" */
  float* values;
  size_t numel; /* of the parameter */
} tw_residual_array;
TW_API tw_status tw_residual_get_all(tw_comm* comm, const tw_residual_array* arrays, size_t count);
TW_API tw_status tw_residual_set_all(tw_comm* comm, const tw_residual_array* arrays, size_t count);

/* How many CUDA devices can be used. TW_UNAVAILABLE, and the reason, if none can. */
TW_API tw_status tw_cuda_device_count(const char* cuda_library, int* count);

/* A layer of a model, or several that are reduced together, and its computing in a step. */
typedef struct {
  size_t numel;
  double forward_s, backward_s;
} tw_layer;

/* A training step on a link, to be simulated: schedule/sim/simulator.h. It grows as tw_options
 * does: at the end, by fields of 8 bytes whose zero means what a caller without them gets. */
typedef struct {
  size_t struct_size;        /* sizeof(tw_simulation) */
  const tw_options* options; /* size, codec, policy, lanes, chunk_bytes, min_bytes, no_raw,
                                topology, local_size, transport */
  const tw_layer* layers;    /* in forward order */
  size_t num_layers;
  double between_s;                    /* after backward, before the first layer is needed again */
  int barrier;                         /* non-zero: the next forward pass waits for everything */
  int planned;                         /* non-zero: the order is predicted, not announced */
  double bytes_per_s, latency_s;       /* of each rank's link, one way */
  double burst_bytes;                  /* that an idle link lets pass at once */
  double overhead_s;                   /* of each exchange, beside its bytes */
  double encode_s, reduce_s, decode_s; /* of one element of a chunk, on one rank */
  double cpu_s_per_byte;               /* of the processor, for what a rank sends */
  double contention;         /* of those with computing: 0 with cores to spare, 1 or more without */
  int steps;                 /* whose mean is taken; 0: four */
  double inside_bytes_per_s; /* of each rank's link inside nodes of options.local_size ranks, which
                                have links of their own; 0: there are no such nodes */
} tw_simulation;

/* Seconds of a step, and, unless bound_s is null, the least that any order of chunks could take. */
TW_API tw_status tw_simulate(const tw_simulation* simulation, double* step_s, double* bound_s);

/* A parameter server. Workers push gradients to keys on servers and pull values from them; the
 * servers apply an optimizer. A member is a worker (tw_kv_create) or a server (tw_kv_serve).
 * Experimental: docs/how-to/parameter-server.md. It grows as tw_options does. */
typedef struct {
  size_t struct_size; /* sizeof(tw_kv_options) */
  int rank; /* workers are numbered from 0, servers from `workers`, and workers that join a
               run from workers + servers */
  int workers, servers;
  int timeout_ms;              /* of meeting, and of every wait; 0: 60,000 */
  tw_store store;              /* used if store.set is not null, else store_path */
  const char* local_group;     /* else: all members are threads of this process */
  const char* store_path;      /* else: a folder that all members share */
  const char* group;           /* key prefix, another one for each store and run */
  const char* mode;            /* of a worker: "sync" (default): a step is applied when all workers
                                  have pushed it; "async": a push is applied when it arrives;
                                  "ssp:staleness=k": no gradient is applied that is older than k
                                  updates for each worker; "sync:quorum=k,grace=s": a step is
                                  applied when all workers have pushed it, or when k have and then
                                  s seconds have passed; a late push counts in the next one */
  const char* codec;           /* of a worker: "fp32" (default); "int4:down=int8": gradients up,
                                  values down */
  size_t slice_elements;       /* that a key is cut into; a multiple of 4096; 0: 65,536,
                                  or fewer, so that one has 80 KiB at most: 16,384 in fp32 */
  size_t bigarray_bound;       /* keys with fewer elements stay whole */
  const char* key_file;        /* as in tw_options */
  const char* interface_name;  /* network interface that a server listens on */
  const char* rendezvous_host; /* a server listens where this host is reached; else loopback */
  const char* zmq_library;     /* path of libzmq.so.5; null: where the dynamic linker looks, then
                                  pyzmq's */
  const char* journal;         /* of a server: "FOLDER", in which it keeps the journal that it comes
                                  back from when it was killed and is started again with its rank;
                                  "FOLDER,bytes=1073741824,durable=fsync": inputs between two
                                  snapshots; on the disk before they are answered. Null: none, and a
                                  lost server is the end of the store */
} tw_kv_options;

typedef struct tw_kv tw_kv; /* one worker's store */

TW_API void tw_kv_options_init_sized(tw_kv_options* options, size_t struct_size);
#define tw_kv_options_init(options) tw_kv_options_init_sized((options), sizeof(tw_kv_options))

/* The version of ZeroMQ that a store would use; `library` as in tw_kv_options.zmq_library.
 * TW_UNAVAILABLE says why there is none, or none that will do. */
TW_API tw_status tw_zmq_version(const char* library, char* text, size_t capacity);

/* Serves on the calling thread until every worker has left. The status is the store's failure,
 * which its workers have been told; or of the journal, whose file it names: TW_INVALID_ARGUMENT
 * (can't be written), TW_MISMATCH (of other numbers of members, or another process writes it) or
 * TW_DATA_LOSS (damaged).
 *
 * A server that was killed after all workers had left, and is started again, may find the
 * rendezvous store gone. The caller then calls this without store, store_path and local_group: if
 * the journal was written within timeout_ms and says that all workers had left, it is removed and
 * the status is TW_OK; else TW_INVALID_ARGUMENT, and the server must wait for that store. */
TW_API tw_status tw_kv_serve(const tw_kv_options* options);

/* Returns when all servers are connected. A key is used by one thread at a time. tw_kv_set_codec,
 * tw_kv_init, tw_kv_set_optimizer, tw_kv_barrier, tw_kv_save and tw_kv_load are called by every
 * worker, in the same order, beside no other call of this store. The first failure is the status of
 * every later call.
 *
 * In all modes but sync a worker may join when the others have set the store up, with the rank of
 * one that is gone or with workers + servers or more. Until its first push, these calls do not wait
 * for the others, and leave the store as it is. TW_MISMATCH in sync, or if it is set up
 * differently.
 */
TW_API tw_status tw_kv_create(const tw_kv_options* options, tw_kv** kv);
TW_API void tw_kv_destroy(tw_kv* kv); /* when the servers have taken what was pushed */

/* Replaces tw_kv_options.codec for the keys of later calls of tw_kv_init. */
TW_API tw_status tw_kv_set_codec(tw_kv* kv, const char* codec);

/* This struct does not know its size, so it never grows. */
typedef struct {
  const char* key;
  const void* values;
  size_t count;
  tw_dtype dtype;
  size_t width; /* 0: dense; else the value is row-sparse, and this is the elements of a row */
} tw_kv_tensor;
/* Adds keys, which get worker 0's values, exact. */
TW_API tw_status tw_kv_init(tw_kv* kv, const tw_kv_tensor* tensors, size_t count);

/* Tensors are on the host and have as many elements as their key. A pushed one may be reused when
 * the call returns; a pulled one is written until tw_kv_wait has returned. A higher priority goes
 * first. tw_kv_push_pull takes one message where the two take two. In sync a push waits while eight
 * pushes of its key before it are not applied, since others have not pushed. weight: 1; in mode
 * sync:quorum=k,grace=s any positive number, such as the samples or tokens of a gradient: an update
 * is the mean of its pushes by weight. TW_INVALID_ARGUMENT for another one. */
TW_API tw_status tw_kv_push(tw_kv* kv, const char* key, const void* send, size_t count,
                            tw_dtype dtype, int priority, double weight);
TW_API tw_status tw_kv_pull(tw_kv* kv, const char* key, void* recv, size_t count, tw_dtype dtype,
                            int priority);
TW_API tw_status tw_kv_push_pull(tw_kv* kv, const char* key, const void* send, void* recv,
                                 size_t count, tw_dtype dtype, int priority, double weight);

/* The same for a row-sparse key, such as the table of an embedding, of which a step needs a few
 * rows: of send and recv, row i of `width` elements is row rows[i] of the key, and count is the
 * elements of all row_count of them. Rows come in any order. One that is pushed twice is summed.
 * Servers apply an optimizer to the rows that were pushed, and leave the others and their state as
 * they are; each worker's push counts as one, also one of no rows. Rows are exact, but with the
 * codecs bf16, and int8, which rounds them at random. TW_INVALID_ARGUMENT for a row that there is
 * none of, or a count that is not row_count * width. */
TW_API tw_status tw_kv_push_rows(tw_kv* kv, const char* key, const int64_t* rows, size_t row_count,
                                 const void* send, size_t count, tw_dtype dtype, int priority,
                                 double weight);
TW_API tw_status tw_kv_pull_rows(tw_kv* kv, const char* key, const int64_t* rows, size_t row_count,
                                 void* recv, size_t count, tw_dtype dtype, int priority);
/* Both by one message. The rows that are pulled need not be those that are pushed. */
TW_API tw_status tw_kv_push_pull_rows(tw_kv* kv, const char* key, const int64_t* push_rows,
                                      size_t push_row_count, const void* send, size_t send_count,
                                      const int64_t* pull_rows, size_t pull_row_count, void* recv,
                                      size_t recv_count, tw_dtype dtype, int priority,
                                      double weight);
TW_API tw_status tw_kv_wait(tw_kv* kv, const char* key); /* null: all keys */

/* "sum" (default, in sync only): a pull is the sum of a step's pushes; "add:lr=1", "sgd:lr=0.1,
 * momentum=0.9,nesterov=1,weight_decay=0", "adam:lr=1e-3,beta1=0.9,beta2=0.999,eps=1e-8", "adamw",
 * "adagrad:lr=0.01,lr_decay=0", each with rescale=1: what gradients are multiplied by. Other
 * numbers for the present name keep its state. */
TW_API tw_status tw_kv_set_optimizer(tw_kv* kv, const char* spec);
TW_API tw_status tw_kv_barrier(tw_kv* kv);
/* Worker 0 writes or reads a file of all values and the optimizer's state, and each worker its
 * residuals at PATH.worker-RANK. TW_INVALID_ARGUMENT on all workers, and former files stay, if one
 * can't write or worker 0 is gone; and nothing is loaded, for a file that is missing, damaged, of
 * another save or of another optimizer that keeps arrays. */
TW_API tw_status tw_kv_save(tw_kv* kv, const char* path);
TW_API tw_status tw_kv_load(tw_kv* kv, const char* path);

/* As tw_comm_describe. */
TW_API tw_status tw_kv_describe(tw_kv* kv, char* text, size_t capacity, size_t* bytes);
/* Hands out the samples of some epochs to whichever worker asks, in ranges of `batch`; not in sync,
 * nor with a quorum, with more than one worker. */
typedef struct {
  uint64_t epoch, first, count; /* samples first to first + count; count 0: all are done */
  int waited;                   /* 1: pull before the next push */
} tw_kv_work;
/* `share` counts from 1; each is of one plan (samples, batch, epochs), the same on all workers. The
 * pushes of the first `applied` ranges that this worker took of the share are applied: the others
 * go to other workers if this one is gone. So each sample is handed out once, and once more if its
 * worker was lost. Waits while others hold all that is left. */
TW_API tw_status tw_kv_take(tw_kv* kv, uint32_t share, uint64_t samples, uint64_t batch,
                            uint64_t epochs, uint64_t applied, tw_kv_work* work);

/* 1 if the others had set the store up when this worker came, which they can't have in sync. */
TW_API tw_status tw_kv_has_joined(tw_kv* kv, int* joined);
/* What this worker has sent so far. */
TW_API tw_status tw_kv_bytes_sent(tw_kv* kv, uint64_t* bytes);

/* "AVX3", "AVX2", ...: the instruction set that the codecs use here. */
TW_API const char* tw_simd_target(void);

#ifdef __cplusplus
}
#endif

#endif /* THINWIRE_INTEGRATIONS_C_THINWIRE_H_ */
