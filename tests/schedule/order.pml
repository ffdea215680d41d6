/* The order of chunks (schedule/order/sequencer.h) and the lanes that follow it, for spin.

   N ranks make C chunks ready, each in any order. Rank 0's leader announces those that all ranks
   have reported, in any order (so under any policy), with a window of announced but unfinished
   ones. Ranks start chunks in the announced order, on LANES lanes; a chunk is exchanged once all
   ranks hold it. A chunk may never come on one rank, or a rank may die: then a deadline passes
   (spin's `timeout`), and everybody must end with an error.

   The search checks that no rank is left waiting (an invalid end state), that no deadline passes
   without a fault, and that no lane gets a chunk that its rank does not have.

   -DLANES=1|2  -DNEVER=1: chunk 0 never comes on rank 2  -DDIES=n: rank n may die (9: none)
   -DLOCAL_ORDER=1: the mistake to be found: each rank starts the chunks that are ready locally */

#define N 3
#define C 4
#define WINDOW LANES
#define NOBODY 9

byte reports[C];     /* ranks that have the chunk ready */
byte holders[C];     /* ranks that have a lane for it */
byte unfinished;     /* announced, not finished on rank 0 */
bool announced[C];
bool failed[N];
chan order[N] = [C] of { byte };

inline fail_all() {
  failed[0] = true; failed[1] = true; failed[2] = true
}

#define ANNOUNCE(c)                                                          \
  :: atomic { !announced[c] && reports[c] == N && unfinished < WINDOW ->     \
       announced[c] = true; count++; unfinished++;                           \
       order[0]!c; order[1]!c; order[2]!c }

proctype Leader() {
  byte count = 0;
  do
  :: count == C || failed[0] -> break
  ANNOUNCE(0) ANNOUNCE(1) ANNOUNCE(2) ANNOUNCE(3)
  od
}

/* Backward makes a chunk ready, in any order. */
#define MAKE_READY(c) \
  :: atomic { !ready[c] && !(NEVER && c == 0 && me == 2) -> ready[c] = true; reports[c]++ }

/* The mistake: any chunk that is ready here gets a lane. */
#define TAKE_ANY(c) \
  :: atomic { LOCAL_ORDER && lanes > 0 && ready[c] && !taken[c] -> \
       taken[c] = true; running[c] = true; lanes--; holders[c]++ }

/* A chunk that all ranks hold is exchanged. */
#define EXCHANGE(c)                                                       \
  :: atomic { running[c] && holders[c] == N ->                            \
       running[c] = false; finished++; lanes++;                           \
       if :: me == 0 && !LOCAL_ORDER -> unfinished-- :: else -> skip fi }

proctype Rank(byte me) {
  bool ready[C], taken[C], running[C];
  byte lanes = LANES, finished = 0, c;
  do
  :: finished == C || failed[me] -> break
  MAKE_READY(0) MAKE_READY(1) MAKE_READY(2) MAKE_READY(3)
  TAKE_ANY(0) TAKE_ANY(1) TAKE_ANY(2) TAKE_ANY(3)
  EXCHANGE(0) EXCHANGE(1) EXCHANGE(2) EXCHANGE(3)
  /* A free lane takes the next announced chunk. */
  :: atomic { !LOCAL_ORDER && lanes > 0 && nempty(order[me]) ->
       order[me]?c; assert(ready[c]); running[c] = true; lanes--; holders[c]++ }
  :: DIES == me -> break
  /* Nothing moves: a wait for a dead rank, or for a chunk that never comes, passes its deadline. */
  :: timeout -> assert(NEVER || DIES < N); fail_all(); break
  od
}

init {
  atomic {
    if :: !LOCAL_ORDER -> run Leader() :: else -> skip fi;
    run Rank(0); run Rank(1); run Rank(2)
  }
}
