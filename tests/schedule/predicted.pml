/* The predicted order and its window, beside the announced order, for spin.

   Rank 0 predicts: it sends the order of P chunks to N ranks. A rank may start a predicted
   chunk once it has itself submitted it, whatever the others have. Only the first HELD of its
   unfinished chunks, in the predicted order, are candidates (held). The oldest unfinished one
   starts in any case. Another one starts only if it is the first of those that are submitted and
   not started, and if the bytes under way stay within the limit with it (half of the limit, if it
   overtakes one that is not submitted), or are none without it. A chunk is under way with the bytes
   of the hop that it is at, on each rank by what that rank has seen, and with none once it has ended.
   A hop of a chunk ends when all ranks have begun it. A predicted chunk has two hops, of 1 and 2
   bytes or of 2 and 1, and chunk 1 has one. A tensor of several chunks needs no
   model of its own: its chunks are submitted one right after the other, which is among the
   interleavings. A further A chunks are not predicted: they are announced as in order.pml, and
   run on LANES lanes of their own.

   Rank 0 may withdraw a predicted chunk that it has not submitted, at any time. The others learn of it
   later, each at its own time, but before they learn of anything that rank 0 announces after it. A rank
   that has started the chunk goes on, and it no longer belongs to the predicted order. When all ranks
   have submitted it, it is announced, and the ranks that have not started it do so. Its exchange may
   be over on a rank that does not know yet that it was withdrawn.

   A program may wait: a rank submits an urgent chunk, which the prediction has first, only when another one
   is done. Once all ranks have submitted that other one, rank 0 may withdraw it, even if it has started.
   (The sequencer does so after a while in which nothing moves.)

   A chunk may never be submitted on one rank or on all, or a rank may die: then a deadline passes
   (spin's `timeout`), and everybody must end with an error.

   The search checks that no rank is left waiting (an invalid end state), that no deadline passes
   without a fault, that no more than HELD predicted chunks are under way, and that no lane is given
   a chunk that its rank does not have. When a deadline passes for a chunk that was never submitted,
   everything before it in its order is done, the other order is done, and exactly the ranks that
   never submitted it have not started it: so the error can name them.

   -DP=2..4 -DA=0..2 -DLANES=1  -DFAULT=0|1 (a chunk never comes)|2 (a rank dies)|3 (one is withdrawn)|4 (ranks wait)
   Mistakes to be found: -DNO_OLDEST=1: the window limits the oldest chunk as well
   -DLOCAL_ORDER=1: the chunks submitted here are held, not the first of the predicted order
   -DSHARED_LANES=1: predicted chunks run on the lanes of announced ones
   -DSTARTS_AGAIN=1: a rank starts a withdrawn chunk as it is announced, though it has started it
   -DNEVER_WITHDRAWS=1: rank 0 keeps to the prediction, whatever ranks wait for */

#define N 3
#define C (P + A)    /* predicted chunks come first, in their order */
#define HELD 2
#define BYTES(c) (1 + (c) % 2)         /* bytes of the first hop */
#define SECOND_BYTES(c) (2 - (c) % 2)
#define HAS_SECOND(c) (c < P && c != 1)

#define NEVER 1
#define DIES 2
#define WITHDRAWN 3
#define WAITS 4
#define NONE 9
#define OFF 8         /* announces the withdrawn chunk */

#define ABSENT 0     /* states of a chunk on a rank */
#define READY 1
#define RUNNING 2
#define SECOND 3     /* it is at its second hop */
#define DONE 4

byte limit;          /* the most predicted bytes under way */
byte missing = NONE; /* this chunk is never submitted on rank 2, */
bool everywhere;     /* or on no rank at all */
byte dying = NONE;   /* this rank may die */
bool dead, failed;
byte off = NONE;     /* rank 0 may withdraw this chunk */
bool withdrawn;
bool in_window;      /* it is announced, and had not started on rank 0 before */
byte urgent = NONE;  /* these ranks submit this chunk when `off` is done */
byte waiting;        /* a bit per rank */
bool plan_sent;
byte reports[C];     /* ranks that have submitted the chunk */
byte started[C];     /* ranks that have started it */
byte passed[C];      /* ranks on which it has begun its second hop */
byte done[C];        /* ranks on which it has finished */
byte unfinished;     /* chunks announced, but not finished on rank 0 */
bool announced[C];
chan order[N] = [2] of { byte };
hidden byte place, held, room; /* used by a scan, which is one atomic step, so not part of the state */

#define ANNOUNCE(c)                                                                   \
  :: atomic { c < C && !announced[c] && reports[c] == N && unfinished < LANES ->      \
       announced[c] = true; count++; unfinished++; order[0]!c; order[1]!c; order[2]!c }

proctype Leader() {
  byte count = 0;
  do
  :: (off == NONE && count == A) || failed || (dead && dying == 0) -> break
  :: FAULT == WITHDRAWN && count == A + withdrawn && reports[off] == N -> break
  :: FAULT == WAITS && count == A + withdrawn && done[off] == N -> break
  ANNOUNCE(P) ANNOUNCE(P + 1)
  :: atomic { withdrawn && !announced[off] && reports[off] == N && (unfinished < LANES || !in_window) ->
       announced[off] = true; count++; unfinished = unfinished + in_window;
       order[0]!OFF; order[1]!OFF; order[2]!OFF }
  od
}

inline start(c) {
  state[c] = RUNNING; started[c]++
}

#define FITS (under_way == 0 || under_way + BYTES(place) <= room)
#define IS_OLDEST (held == 1 && !NO_OLDEST)
#define HAS_LANE ((!LOCAL_ORDER || running < HELD) && (!SHARED_LANES || lanes > 0))
#define NOT_HELD \
  (state[place] == DONE || (LOCAL_ORDER && state[place] == ABSENT) || (gone && place == off))
#define AS_ANNOUNCED(c) (c >= P || (gone && !ahead && c == off))

/* After each event a rank starts all predicted chunks that may start. */
inline start_predicted() {
  place = 0; held = 0; room = limit;
  do
  :: place == P || held == HELD || !has_plan -> break
  :: else ->
       if
       :: NOT_HELD -> skip
       :: else ->
            held++;
            if /* The first one that is submitted but may not start holds back those behind it. */
            :: state[place] == READY && HAS_LANE && (IS_OLDEST || FITS) ->
                 start(place);
                 under_way = under_way + BYTES(place); running++;
                 if :: SHARED_LANES -> lanes-- :: else -> skip fi;
                 assert(running <= HELD)
            :: state[place] == READY && !(HAS_LANE && (IS_OLDEST || FITS)) -> break
            :: state[place] == ABSENT -> room = limit / 2
            :: else -> skip
            fi
       fi;
       place++
  od
}

#define IS_WAITING(c) (c == urgent && (waiting >> me) & 1 && state[off] != DONE)

#define SUBMIT(c)                                                                     \
  :: atomic { c < C && state[c] == ABSENT && !(c == missing && (everywhere || me == 2)) && !IS_WAITING(c) -> \
       state[c] = READY; reports[c]++; start_predicted() }

/* This rank knows that the chunk is withdrawn. */
inline leave_order() {
  gone = true; ahead = state[off] > READY;
  if :: state[off] == RUNNING || state[off] == SECOND -> running-- :: else -> skip fi;
  start_predicted()
}

#define HOP_BYTES(c) (HAS_SECOND(c) -> SECOND_BYTES(c) : BYTES(c))
#define IS_LAST_OVER(c)                                                               \
  (HAS_SECOND(c) -> state[c] == SECOND && passed[c] == N : state[c] == RUNNING && started[c] == N)

/* A hop ends once all ranks have begun it. */
#define EXCHANGE(c)                                                                   \
  :: atomic { HAS_SECOND(c) && state[c] == RUNNING && started[c] == N ->              \
       state[c] = SECOND; passed[c]++;                                                \
       if                                                                             \
       :: AS_ANNOUNCED(c) -> skip                                                     \
       :: else -> under_way = under_way - BYTES(c) + SECOND_BYTES(c)                  \
       fi;                                                                            \
       start_predicted() }                                                            \
  :: atomic { c < C && IS_LAST_OVER(c) ->                                             \
       state[c] = DONE; done[c]++; finished++;                                        \
       if                                                                             \
       :: AS_ANNOUNCED(c) -> lanes++                                                  \
       :: else -> under_way = under_way - HOP_BYTES(c);                               \
            if :: gone && c == off -> skip :: else -> running-- fi;                   \
            if :: SHARED_LANES -> lanes++ :: else -> skip fi                          \
       fi;                                                                            \
       if :: me == 0 && AS_ANNOUNCED(c) -> unfinished-- :: else -> skip fi;           \
       start_predicted() }

/* Announced chunks have no order among themselves: the leader skips a missing one. */
#define BEHIND_MISSING(c) (c == missing || (missing < P && missing < c && c < P))

/* Nothing moves, and a rank's deadline passes. */
inline deadline() {
  assert(dead || missing != NONE);
  place = 0;
  do
  :: place == C || dead -> break
  :: else ->
       assert(done[place] == N || BEHIND_MISSING(place));
       assert(place != missing || place >= P || started[place] == (everywhere -> 0 : N - 1));
       place++
  od
}

proctype Rank(byte me) {
  byte state[C];
  byte under_way, running; /* predicted chunks under way: their bytes, and their number */
  byte lanes = LANES, finished = 0, c;
  bool has_plan;
  bool gone, ahead; /* this rank knows that the chunk is withdrawn; had started it before */
  do
  :: finished == C || failed -> break
  :: atomic { !has_plan && (me == 0 || plan_sent) ->
       has_plan = true; plan_sent = true; start_predicted() }
  SUBMIT(0) SUBMIT(1) SUBMIT(2) SUBMIT(3)
  EXCHANGE(0) EXCHANGE(1) EXCHANGE(2) EXCHANGE(3)
  /* A free lane takes the next announced chunk. */
  :: atomic { lanes > 0 && nempty(order[me]) && !order[me]?[OFF] ->
       order[me]?c; assert(state[c] == READY); start(c); lanes--; c = 0 }
  :: atomic { off != NONE && gone && (lanes > 0 || ahead) && order[me]?[OFF] ->
       order[me]?c; c = 0;
       if
       :: ahead && !STARTS_AGAIN -> skip
       :: else -> assert(state[off] == READY); start(off); lanes--
       fi }
  :: atomic { FAULT == WITHDRAWN && me == 0 && has_plan && !withdrawn && state[off] == ABSENT ->
       withdrawn = true; in_window = true; gone = true; start_predicted() }
  :: atomic { FAULT == WAITS && !NEVER_WITHDRAWS && me == 0 && has_plan && !withdrawn &&
              reports[off] == N && state[off] != DONE ->
       withdrawn = true; in_window = state[off] == READY; leave_order() }
  :: atomic { me != 0 && has_plan && withdrawn && !gone -> leave_order() }
  :: dying == me -> dead = true; break
  :: timeout -> atomic { deadline(); failed = true; break }
  od
}

init {
  atomic {
    select(limit : 2 .. 4); /* fits a long chunk, or also a short one beside it; or half of that */
    if
    :: FAULT == NEVER -> /* The announced chunks are all alike. */
         select(missing : 0 .. (A == 0 -> P - 1 : P)); select(everywhere : 0 .. 1)
    :: FAULT == DIES -> select(dying : 0 .. 1) /* Ranks 1 and 2 are alike. */
    :: FAULT == WITHDRAWN -> select(off : 0 .. P - 1)
    :: FAULT == WAITS ->
         select(off : 1 .. P - 1); select(urgent : 0 .. P - 2); select(waiting : 1 .. 7);
         if :: urgent >= off -> urgent = off - 1 :: else -> skip fi
    :: else -> skip
    fi;
    run Leader(); run Rank(0); run Rank(1); run Rank(2)
  }
}
