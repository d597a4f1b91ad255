// A stand-in for NCCL. Its all-reduces work on host memory: the last rank that calls computes for all. Calls take a while,
// which those of blocking communicators wait for, as NCCL's do, also for the other ranks; an abort ends their wait. What a version does to misuse, or needs of its caller, is counted in `misuses`. The functions
// stub_* tell it what to do. Communicators are never freed, so that their use after the end is counted too.
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef EMPTY

enum { SUCCESS = 0, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

// The calls that can be made to fail, as src/lib.rs numbers them.
enum { CALL_UNIQUE_ID, CALL_INIT, CALL_ALL_REDUCE, CALL_REGISTER, CALLS };

// What is counted, as src/lib.rs numbers it.
enum { INITS, DESTROYS, ABORTS, ALL_REDUCES, REGISTERS, DEREGISTERS, RECLAIMED, MISUSES, IDS, COUNTERS };

enum { MAX_RANKS = 16, MAX_WINDOWS = 64, MAX_GROUPS = 256 };

struct unique_id {
  char internal[128];
};

struct config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
};

struct window {
  uintptr_t address;
  size_t bytes;
};

struct comm {
  struct group *group;
  int rank;
  int dead;        // destroyed or aborted
  int ready;       // its init has succeeded
  int blocking;    // its calls return when they are over
  int state;       // what ncclCommGetAsyncError gives once the polls are over
  int polls;       // how many of those say "in progress" before
  int collectives; // how many it has called
  struct window *windows[MAX_WINDOWS];
  // A window that is being registered is given when the polls are over.
  void **window_place;
  struct window *window;
};

struct call {
  const void *input;
  void *output;
  size_t count;
  int dtype, op;
};

struct group {
  int id, world, joined;
  struct comm *comms[MAX_RANKS];
  // The all-reduce that ranks are in.
  int called[MAX_RANKS];
  struct call calls[MAX_RANKS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct group groups[MAX_GROUPS];
static int group_count;
static int64_t counters[COUNTERS];
static char last_error[256];
static struct {
  int code, times, late;
  char text[256];
} faults[CALLS][MAX_RANKS];
static int hanging[MAX_RANKS];
static int blocking[MAX_RANKS];
static int lazy_windows, default_polls = 2, block_end, last_max_ctas = INT_MIN;

void stub_fail(int call, int rank, int code, int times, int late, const char *text) {
  pthread_mutex_lock(&mutex);
  faults[call][rank].code = code;
  faults[call][rank].times = times;
  faults[call][rank].late = late;
  strncpy(faults[call][rank].text, text, sizeof faults[call][rank].text - 1);
  pthread_mutex_unlock(&mutex);
}

void stub_hang_init(int rank, int hang) {
  pthread_mutex_lock(&mutex);
  hanging[rank] = hang;
  pthread_mutex_unlock(&mutex);
}

// Lets the call itself not return, as a non-blocking communicator's should.
void stub_block_init(int rank, int block) { __atomic_store_n(&blocking[rank], block, __ATOMIC_SEQ_CST); }

void stub_lazy_windows(int lazy) { lazy_windows = lazy; }
void stub_polls(int polls) { default_polls = polls; }
void stub_block_end(int block) { __atomic_store_n(&block_end, block, __ATOMIC_SEQ_CST); }
int stub_max_ctas(void) { return last_max_ctas; }

int64_t stub_count(int what) {
  pthread_mutex_lock(&mutex);
  int64_t count = counters[what];
  pthread_mutex_unlock(&mutex);
  return count;
}

// An error that a rank's communicator finds on its own.
void stub_async_error(int rank, int code, const char *text) {
  pthread_mutex_lock(&mutex);
  for (int index = 0; index < group_count; index++)
    if (groups[index].comms[rank]) groups[index].comms[rank]->state = code;
  strncpy(last_error, text, sizeof last_error - 1);
  pthread_mutex_unlock(&mutex);
}

// The fault that this call has now, or 0. With the mutex held.
static int fault(int call, int rank, int *late) {
  if (rank < 0 || rank >= MAX_RANKS || !faults[call][rank].times) return SUCCESS;
  faults[call][rank].times--;
  *late = faults[call][rank].late;
  memcpy(last_error, faults[call][rank].text, sizeof last_error);
  return faults[call][rank].code;
}

static int usable(struct comm *comm) {
  if (comm && !comm->dead) return 1;
  counters[MISUSES]++;
  return 0;
}

int ncclGetVersion(int *version) {
  *version = VERSION;
  return SUCCESS;
}

const char *ncclGetErrorString(int code) {
  static const char *const texts[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                      "internal error",   "invalid argument",     "invalid usage",
                                      "remote error",     "in progress"};
  return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

const char *ncclGetLastError(struct comm *comm) {
  (void)comm;
  return last_error;
}

int ncclGetUniqueId(struct unique_id *id) {
  pthread_mutex_lock(&mutex);
  int late, status = fault(CALL_UNIQUE_ID, 0, &late);
  if (!status) {
    memset(id, 0, sizeof *id);
    int number = (int)++counters[IDS];
    memcpy(id->internal, &number, sizeof number);
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

static void wait_while(int *flag) {
  while (__atomic_load_n(flag, __ATOMIC_SEQ_CST)) nanosleep(&(struct timespec){0, 1000000}, NULL);
}

int ncclCommGetAsyncError(struct comm *comm, int *state) {
  pthread_mutex_lock(&mutex);
  int status = SUCCESS;
  if (!usable(comm)) {
    status = INVALID_ARGUMENT;
  } else if (comm->state) {
    *state = comm->state;
  } else if (!comm->ready && (hanging[comm->rank] || comm->group->joined < comm->group->world)) {
    *state = IN_PROGRESS;
  } else if (comm->polls > 0) {
    comm->polls--;
    *state = IN_PROGRESS;
  } else {
    comm->ready = 1;
    if (comm->window_place) *comm->window_place = comm->window;
    comm->window_place = NULL;
    *state = SUCCESS;
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

// What a call of a blocking communicator returns, and when.
static int settled(struct comm *comm, int status) {
  if (!comm || !comm->blocking) return status;
  while (status == IN_PROGRESS) {
    int state = INTERNAL;
    // The abort is seen first, by which the communicator can't be asked any more.
    if (__atomic_load_n(&comm->dead, __ATOMIC_SEQ_CST)) return INTERNAL;
    ncclCommGetAsyncError(comm, &state);
    status = state;
    if (status == IN_PROGRESS) nanosleep(&(struct timespec){0, 100000}, NULL);
  }
  return status;
}

int ncclCommInitRankConfig(struct comm **out, int world, struct unique_id id, int rank, struct config *config) {
  if (rank >= 0 && rank < MAX_RANKS) wait_while(&blocking[rank]);
  pthread_mutex_lock(&mutex);
  int late = 0, status = SUCCESS;
  struct comm *comm = NULL;
  if (config->size != sizeof *config || config->magic != 0xcafebeef || config->version < 21800 ||
      config->blocking < 0 || config->blocking > 1 || config->cga_cluster_size != INT_MIN || config->min_ctas != INT_MIN || config->net_name ||
      config->split_share != INT_MIN || rank < 0 || rank >= world || world > MAX_RANKS) {
    counters[MISUSES]++;
    status = INVALID_ARGUMENT;
    goto end;
  }
  last_max_ctas = config->max_ctas;
  int code = fault(CALL_INIT, rank, &late);
  if (code && !late) {
    status = code;
    goto end;
  }
  int number;
  memcpy(&number, id.internal, sizeof number);
  struct group *group = NULL;
  for (int index = 0; index < group_count; index++)
    if (groups[index].id == number) group = &groups[index];
  if (!group) {
    if (group_count == MAX_GROUPS) {
      status = INTERNAL;
      goto end;
    }
    group = &groups[group_count++];
    group->id = number;
    group->world = world;
  }
  comm = calloc(1, sizeof *comm);
  comm->group = group;
  comm->rank = rank;
  comm->blocking = config->blocking;
  comm->state = code ? code : SUCCESS;
  comm->polls = code ? 0 : default_polls;
  group->comms[rank] = comm;
  group->joined++;
  counters[INITS]++;
  status = IN_PROGRESS;
end:
  *out = comm;
  pthread_mutex_unlock(&mutex);
  return settled(comm, status);
}

static float load(const void *from, size_t index, int dtype) {
  if (dtype == 7) return ((const float *)from)[index];
  uint16_t bits = ((const uint16_t *)from)[index];
  uint32_t word = (uint32_t)bits << 16;
  if (dtype == 6) { // Only normal numbers and zero.
    uint32_t exponent = bits >> 10 & 31;
    word = (uint32_t)(bits & 0x8000) << 16;
    if (exponent) word |= (exponent + 112) << 23 | (uint32_t)(bits & 0x3ff) << 13;
  }
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

static void store(void *to, size_t index, int dtype, float value) {
  if (dtype == 7) {
    ((float *)to)[index] = value;
    return;
  }
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  uint16_t bits = (uint16_t)(word >> 16);
  if (dtype == 6) {
    uint32_t exponent = word >> 23 & 255;
    bits = (uint16_t)(word >> 16 & 0x8000);
    if (exponent) bits |= (uint16_t)((exponent - 112) << 10 | (word >> 13 & 0x3ff));
  }
  ((uint16_t *)to)[index] = bits;
}

static void reduce(struct group *group) {
  struct call *calls = group->calls;
  for (size_t index = 0; index < calls[0].count; index++) {
    float result = load(calls[0].input, index, calls[0].dtype);
    for (int rank = 1; rank < group->world; rank++) {
      float value = load(calls[rank].input, index, calls[rank].dtype);
      switch (calls[0].op) {
      case 2: result = value > result ? value : result; break;
      case 3: result = value < result ? value : result; break;
      default: result += value;
      }
    }
    if (calls[0].op == 4) result /= (float)group->world;
    for (int rank = 0; rank < group->world; rank++) store(calls[rank].output, index, calls[rank].dtype, result);
  }
  memset(group->called, 0, sizeof group->called);
}

int ncclAllReduce(const void *input, void *output, size_t count, int dtype, int op, struct comm *comm, void *stream) {
  (void)stream;
  pthread_mutex_lock(&mutex);
  int late = 0, status = SUCCESS;
  // As NCCL has it: not before the communicator is ready, and the last call over.
  if (!usable(comm) || !comm->ready || comm->polls > 0) {
    counters[MISUSES]++;
    status = INVALID_ARGUMENT;
  } else if (comm->state) {
    status = comm->state;
  } else {
    status = fault(CALL_ALL_REDUCE, comm->rank, &late);
    if (status && late) {
      comm->state = status;
      status = IN_PROGRESS;
    } else if (!status) {
      struct group *group = comm->group;
      if (group->called[comm->rank]) { // The stub's streams have room for one call.
        status = INTERNAL;
      } else {
        int all = 1;
        group->called[comm->rank] = 1;
        group->calls[comm->rank] = (struct call){input, output, count, dtype, op};
        for (int rank = 0; rank < group->world; rank++) all &= group->called[rank];
        if (all) reduce(group);
        comm->collectives++;
        counters[ALL_REDUCES]++;
        comm->polls = default_polls;
        status = comm->polls > 0 ? IN_PROGRESS : SUCCESS;
      }
    }
  }
  pthread_mutex_unlock(&mutex);
  return settled(comm, status);
}

#ifdef WINDOWS
int ncclCommWindowRegister(struct comm *comm, void *address, size_t bytes, void **out, int flags) {
  pthread_mutex_lock(&mutex);
  int late = 0, status = IN_PROGRESS, code;
  if (!usable(comm) || flags != 1 || (uintptr_t)address % 4096) {
    counters[MISUSES]++;
    status = INVALID_ARGUMENT;
  } else if (lazy_windows && !comm->collectives) {
    strcpy(last_error, "the communicator is not connected yet");
    status = INVALID_USAGE;
  } else if ((code = fault(CALL_REGISTER, comm->rank, &late))) {
    if (late) comm->state = code;
    else status = code;
  } else {
    struct window **place = NULL;
    for (int index = 0; index < MAX_WINDOWS; index++)
      if (!comm->windows[index]) place = &comm->windows[index];
    if (place) {
      *place = calloc(1, sizeof **place);
      **place = (struct window){(uintptr_t)address, bytes};
      *out = NULL;
      comm->window_place = out;
      comm->window = *place;
      comm->polls = default_polls;
      counters[REGISTERS]++;
    } else {
      strcpy(last_error, "no address space is left for windows");
      status = INTERNAL;
    }
  }
  pthread_mutex_unlock(&mutex);
  return settled(comm, status);
}

int ncclCommWindowDeregister(struct comm *comm, struct window *window) {
  pthread_mutex_lock(&mutex);
  int status = INVALID_ARGUMENT;
  if (usable(comm)) {
    for (int index = 0; index < MAX_WINDOWS; index++) {
      if (window && comm->windows[index] == window) {
        free(window);
        comm->windows[index] = NULL;
        counters[DEREGISTERS]++;
        status = SUCCESS;
        break;
      }
    }
    if (status) counters[MISUSES]++;
  }
  pthread_mutex_unlock(&mutex);
  return status;
}
#endif

static int end(struct comm *comm, int counter) {
  // What keeps it, a captured graph say, is not asked of any lock.
  wait_while(&block_end);
  pthread_mutex_lock(&mutex);
  int status = SUCCESS;
  if (!usable(comm)) {
    status = INVALID_ARGUMENT;
  } else {
    if (counter == DESTROYS && !comm->ready) counters[MISUSES]++;
    __atomic_store_n(&comm->dead, 1, __ATOMIC_SEQ_CST);
    counters[counter]++;
    if (VERSION >= 22907) {
      for (int index = 0; index < MAX_WINDOWS; index++) {
        if (comm->windows[index]) counters[RECLAIMED]++;
        free(comm->windows[index]);
        comm->windows[index] = NULL;
      }
    }
    // As NCCL's own thread may until then: the place must still be there.
    if (comm->window_place) *comm->window_place = NULL;
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

int ncclCommDestroy(struct comm *comm) { return end(comm, DESTROYS); }

#ifndef WITHOUT_ABORT
int ncclCommAbort(struct comm *comm) { return end(comm, ABORTS); }
#endif

int ncclCommCount(struct comm *comm, int *count) {
  *count = comm->group->world;
  return SUCCESS;
}

int ncclCommUserRank(struct comm *comm, int *rank) {
  *rank = comm->rank;
  return SUCCESS;
}

#else
int stub_nothing(void) { return 0; }
#endif
