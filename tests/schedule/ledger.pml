/* The ledger of the store (schedule/store/ledger.h), for spin.

   N workers push to a slice and pull it. They make calls that all workers make, become idle, leave,
   are lost and come again, at any time. After each event the ledger does all that its rule allows,
   in any order that it allows. Nothing bounds how often a worker pushes, since a deadline is kept
   as the number of updates that may still come before the gradient.

   Checked in ssp: no gradient is applied after its deadline; a push is held only while a worker
   computes, so held pushes never wait for one another; a held push is applied in the end, unless
   its worker is lost (ltl applied, for worker 0; all are alike). In sync: an update is the push of
   that step of each worker; a pull that follows push t is answered after update t, and in the end,
   or the store has failed because a worker that it needs is gone. With a quorum: pushes wait only
   while a worker computes or the grace ends in the end; each is applied in the end, unless its
   worker is lost or fewer than the quorum are left.

   -DSTALENESS=1|2  0: sync  -DQUORUM=2: of sync; 0: none  -DLTL: check the formula
   -DMISTAKE=n: the model makes a mistake (below), which the search must find */

#define N 3
#define NO_MISTAKE 0
#define BLIND 1     /* a push is applied whatever the others' deadlines are */
#define ALONE 2     /* each other gradient could still be in time, but perhaps not all of them */
#define LATE 3      /* gradients that are too old run again when a call of all workers returns */
#define ANY_CALL 4  /* workers that wait in a later call run again when an earlier one returns */
#define ANY_PUSH 5  /* sync: an update is any N pushes, as in MXNet */
#define IN_CALL 6   /* quorum: a round waits for workers that wait in a call of all workers */
#define LATE_WAITS 7  /* quorum: a pull after a late push waits for the next round */

#define CALLS 2  /* calls in progress at a time, because workers have joined meanwhile */

typedef Worker {
  bool here;     /* a member */
  bool running;  /* it computes a gradient, or its push is held */
  bool held;     /* its push is not applied yet */
  bool pulls;    /* it waits until its push is applied */
  bool leaves;   /* it leaves once its push is applied */
  byte call;     /* the call that it waits in: 1 is the first in progress; 0: none */
  bool paused;   /* the ledger knows that it waits in a call */
  byte excused;  /* it came later than the calls up to this one, which go without it */
  bool late;     /* quorum: a late push of it is held; `held`: one of this round is */
  bool old;      /* quorum: its values are of an earlier round */
  byte left      /* 1 + the updates that may come before its gradient; 0: it is too late */
};
Worker w[N];
byte i, n, calls, joins;
bool failed;

#define EACH(what) what(0) what(1) what(2)
#define ANY(is) (is(0) || is(1) || is(2))
#define IS_HELD(x) w[x].held
#define IS_CALLING(x) (w[x].call > 0)
#define IS_MEMBER(x) (w[x].here && !w[x].leaves)
#define IS_MISSING(x) (IS_MEMBER(x) && w[x].call == 0 && w[x].excused == 0)
#define COMPUTES(x) (w[x].running && !w[x].held && w[x].call == 0)
#define IS_AWAITED(x) (w[x].running && (w[x].held || !w[x].paused))

/* Counts the gradients, except that of `me`, which are due no later than that of x. */
#define GOES_BEFORE(y, x, me) (y != me && IS_AWAITED(y) && w[y].left <= w[x].left)
#define PLACE(x, me) (GOES_BEFORE(0, x, me) + GOES_BEFORE(1, x, me) + GOES_BEFORE(2, x, me))
#define IN_TIME(x, me, updates) \
  (x == me || !IS_AWAITED(x) || PLACE(x, me) + updates <= w[x].left)
/* After `updates` updates all gradients but that of `me` can be applied in time, in some order. */
#define FEASIBLE(me, updates) \
  (IN_TIME(0, me, updates) && IN_TIME(1, me, updates) && IN_TIME(2, me, updates))
#define IN_TIME_ALONE(x, me) (x == me || !IS_AWAITED(x) || w[x].left >= 2)
#define FEASIBLE_ALONE(me) \
  (IN_TIME_ALONE(0, me) && IN_TIME_ALONE(1, me) && IN_TIME_ALONE(2, me))

inline start(x) {
  n = w[0].here + w[1].here + w[2].here;
  w[x].running = true;
  w[x].left = STALENESS * n + 1
}

inline stop(x) {
  w[x].running = false;
  w[x].left = 0
}

inline forget(x) {
  w[x].here = false; w[x].held = false; w[x].pulls = false; w[x].leaves = false;
  w[x].call = 0; w[x].paused = false; w[x].excused = 0; w[x].late = false; w[x].old = false;
  stop(x)
}

inline apply(x) {
  assert(w[x].left > 0);  /* else its gradient is too old */
  w[x].held = false;
  stop(x);
  for (i : 0 .. N - 1) {
    if
    :: w[i].left > 0 -> w[i].left--
    :: else
    fi
  }
  if
  :: w[x].leaves -> forget(x)
  :: !w[x].leaves && w[x].pulls -> w[x].pulls = false; start(x)
  :: else
  fi
}

#define APPLY(x)                                                                       \
  :: w[x].held && (MISTAKE == BLIND || (MISTAKE == ALONE && FEASIBLE_ALONE(x)) ||      \
                   (MISTAKE != ALONE && FEASIBLE(x, 1))) -> apply(x)

inline drain() {
  do
  EACH(APPLY)
  :: else -> break
  od;
  assert(!ANY(IS_HELD) || ANY(COMPUTES))  /* else held pushes wait for one another */
}

/* Workers with the earliest deadlines run again first. */
#define RESUME(x)                                                                              \
  if                                                                                           \
  :: w[x].paused && w[x].left == i && (w[x].call == 1 || MISTAKE == ANY_CALL) ->               \
     w[x].paused = false;                                                                      \
     if                                                                                        \
     :: STALENESS > 0 && w[x].running && !w[x].held && MISTAKE != LATE && !FEASIBLE(N, 0) ->   \
        stop(x)                                                                                \
     :: else                                                                                   \
     fi                                                                                        \
  :: else                                                                                      \
  fi;

#define RETURN(x)                                       \
  if :: w[x].call > 0 -> w[x].call-- :: else fi;        \
  if :: w[x].excused > 0 -> w[x].excused-- :: else fi;

/* A call returns once all members that did not join after it have made it. */
inline end_calls() {
  do
  :: ANY(IS_CALLING) && !ANY(IS_MISSING) ->
     for (i : 0 .. STALENESS * N + 1) { EACH(RESUME) }
     EACH(RETURN)
  :: else -> break
  od
}

inline join(x) {
  forget(x);
  calls = 0;
  for (i : 0 .. N - 1) {
    if
    :: w[i].call > calls -> calls = w[i].call
    :: else
    fi
  }
  w[x].here = true;
  w[x].excused = calls
}

proctype Bounded(byte me) {
  do
  :: atomic {
       if
       :: IS_MEMBER(me) && COMPUTES(me) ->
          w[me].held = true;
          if :: w[me].pulls = true :: skip fi  /* in the same message, or later */
       :: IS_MEMBER(me) && w[me].call == 0 && w[me].held -> w[me].pulls = true
       :: IS_MEMBER(me) && w[me].call == 0 && !w[me].held -> start(me)
       :: IS_MEMBER(me) && COMPUTES(me) -> stop(me)  /* it is idle */
       :: IS_MEMBER(me) && w[me].call == 0 && w[me].excused < CALLS ->
          w[me].call = w[me].excused + 1;
          w[me].paused = true
       :: IS_MEMBER(me) && w[me].call == 0 && w[me].held ->
          w[me].pulls = false;
          w[me].leaves = true
       :: IS_MEMBER(me) && w[me].call == 0 && !w[me].held -> forget(me)
       :: w[me].here -> forget(me)  /* it is lost */
       :: !IS_MEMBER(me) -> join(me)
       fi;
       drain();
       end_calls();
       drain()
     }
  od
}

/* sync. The store fails when a worker waits for another that is gone. */
byte pushed[N];    /* pushes that are not applied */
byte follows[N];   /* updates that a pull waits for */
bool gone[N];
byte given[N];

#define HAS_PUSHED(x) (pushed[x] > 0)
#define IS_STUCK(x) (gone[x] && pushed[x] == 0)
#define WAITS(x) (follows[x] > 0)
#define TAKE_ANY(x) :: i < N && pushed[x] > given[x] -> given[x]++; i++
#define TAKE(x)                                             \
  assert(given[x] == 1);  /* one push of each */            \
  pushed[x] = pushed[x] - given[x];                         \
  given[x] = 0;                                             \
  if :: follows[x] > 0 -> follows[x]-- :: else fi;

inline update() {
  do
  :: (MISTAKE == ANY_PUSH && pushed[0] + pushed[1] + pushed[2] >= N) ||
     (HAS_PUSHED(0) && HAS_PUSHED(1) && HAS_PUSHED(2)) ->
     i = 0;
     if
     :: MISTAKE == ANY_PUSH ->
        do
        EACH(TAKE_ANY)
        :: i == N -> break
        od
     :: else -> given[0] = 1; given[1] = 1; given[2] = 1
     fi;
     EACH(TAKE)
  :: else -> break
  od;
  if
  :: ANY(WAITS) && ANY(IS_STUCK) -> failed = true
  :: else
  fi
}

proctype Stepped(byte me) {
end:
  do
  :: failed -> break
  :: atomic { !failed && pushed[me] < 2 -> pushed[me]++; update() }
  :: atomic { !failed && pushed[me] > 0 -> follows[me] = pushed[me]; update() };
     atomic { follows[me] == 0 || failed -> skip }
  :: atomic { !failed -> gone[me] = true; update(); break }  /* it closes its store */
  :: atomic { !failed -> gone[me] = true; failed = true; break }  /* it is lost */
  od
}

/* A quorum. A worker pushes in time or late, then pulls, and runs again once it has the answer. */
#define HOLDS(x) (w[x].held || w[x].late)
#define HAS_QUORUM (w[0].held + w[1].held + w[2].held >= QUORUM)
#define MAY_PUSH(x) (IS_MEMBER(x) && w[x].running && !w[x].held && !w[x].pulls)
#define IS_RUNNING(x) (MAY_PUSH(x) && w[x].call == 0)
#define IS_WAITED_FOR(x) \
  (IS_MEMBER(x) && w[x].running && !w[x].held && (!w[x].paused || MISTAKE == IN_CALL))

inline apply_round() {
  for (i : 0 .. N - 1) {
    w[i].old = !w[i].held && !w[i].pulls;
    w[i].held = false; w[i].pulls = false; w[i].late = false;
    if
    :: w[i].leaves -> forget(i)
    :: else
    fi
  }
}

inline drain_rounds() {
  do
  :: ANY(HOLDS) && !ANY(IS_WAITED_FOR) -> apply_round()
  :: else -> break
  od;
  assert(failed || !ANY(HOLDS) || ANY(IS_RUNNING) || HAS_QUORUM)
}

proctype Rounds(byte me) {
  do
  :: failed -> break
  :: atomic {
       !failed ->
       if
       :: IS_RUNNING(me) && w[me].old ->
          w[me].late = true;
          w[me].old = false;
          w[me].pulls = MISTAKE == LATE_WAITS
       :: IS_RUNNING(me) && !w[me].old -> w[me].held = true
       :: IS_MEMBER(me) && w[me].call == 0 && !w[me].held && !w[me].pulls &&
          (!w[me].running || w[me].old) -> w[me].running = true; w[me].old = false
       :: IS_MEMBER(me) && w[me].call == 0 && w[me].excused < CALLS ->
          w[me].call = w[me].excused + 1;
          w[me].paused = true
       :: IS_MEMBER(me) && w[me].call == 0 ->
          if
          :: HOLDS(me) -> w[me].leaves = true
          :: else -> forget(me)
          fi
       :: IS_MEMBER(me) ->  /* it is lost */
          forget(me);
          failed = IS_MEMBER(0) + IS_MEMBER(1) + IS_MEMBER(2) < QUORUM
       :: !w[me].here && joins < 2 -> joins++; join(me)
       :: else -> skip
       fi;
       drain_rounds();
       end_calls();
       drain_rounds()
     }
  od
}

/* The grace ends at any time after there is a quorum. */
proctype Grace() {
  do
  :: failed -> break
  :: atomic { !failed && HAS_QUORUM -> apply_round(); drain_rounds() }
  od
}

init {
  atomic {
    for (i : 0 .. N - 1) {
      w[i].here = true;
      w[i].running = true;
      w[i].left = STALENESS * N + 1
    }
    if
    :: QUORUM > 0 ->
       w[0].left = 0; w[1].left = 0; w[2].left = 0;
       run Rounds(0); run Rounds(1); run Rounds(2); run Grace()
    :: QUORUM == 0 && STALENESS > 0 -> run Bounded(0); run Bounded(1); run Bounded(2)
    :: QUORUM == 0 && STALENESS == 0 -> run Stepped(0); run Stepped(1); run Stepped(2)
    fi
  }
}

#ifdef LTL
ltl applied { [] (HOLDS(0) -> <> (!HOLDS(0) || failed)) }
#endif
