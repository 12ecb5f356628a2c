// A plain loop of mj_step on pinned threads: what the same CPUs do without any library around the engine.
// Each worker has a copy of the model and one mjData; environments are handed out one by one.

#define _GNU_SOURCE
#include <mujoco/mujoco.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
  int workers;
  int* cpus;  // of each worker, -1 for any
  mjModel** models;
  mjData** datas;
} Loop;

typedef struct {
  const Loop* loop;
  int snapshots, envs, decimation;
  const mjtNum *states, *kp, *kd;  // (snapshots, envs, state size), twice (snapshots, envs, nu); kp and kd may be NULL
  mjtNum* out;                     // as states: what they become
  double* seconds;                 // (snapshots): time of each whole batch
  atomic_int* next;                // (snapshots): first environment that nobody has taken
  pthread_barrier_t barrier;
} Round;

typedef struct {
  Round* round;
  int worker;
} Task;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void set_gains(mjModel* m, const mjtNum* kp, const mjtNum* kd) {
  for (int i = 0; i < m->nu; i++) {
    if (kp) {
      m->actuator_gainprm[i * mjNGAIN] = kp[i];
      m->actuator_biasprm[i * mjNBIAS + 1] = -kp[i];
    }
    if (kd) m->actuator_biasprm[i * mjNBIAS + 2] = -kd[i];
  }
}

static void step_env(const Round* r, mjModel* m, mjData* d, size_t row) {
  size_t size = (size_t)mj_stateSize(m, mjSTATE_INTEGRATION), nu = (size_t)m->nu;
  set_gains(m, r->kp ? r->kp + row * nu : NULL, r->kd ? r->kd + row * nu : NULL);
  mj_setState(m, d, r->states + row * size, mjSTATE_INTEGRATION);
  for (int i = 0; i < r->decimation; i++) mj_step(m, d);
  mj_getState(m, d, r->out + row * size, mjSTATE_INTEGRATION);
}

static void* work(void* argument) {
  const Task* task = argument;
  Round* r = task->round;
  mjModel* m = r->loop->models[task->worker];
  mjData* d = r->loop->datas[task->worker];
  for (int k = 0; k < r->snapshots; k++) {
    double began = 0;
    pthread_barrier_wait(&r->barrier);  // everyone is here: time begins before anyone goes on
    if (task->worker == 0) began = now();
    pthread_barrier_wait(&r->barrier);
    for (int env; (env = atomic_fetch_add(&r->next[k], 1)) < r->envs;) step_env(r, m, d, (size_t)k * r->envs + env);
    pthread_barrier_wait(&r->barrier);
    if (task->worker == 0) r->seconds[k] = now() - began;
  }
  return NULL;
}

static pthread_t start(Task* task) {
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  int cpu = task->round->loop->cpus[task->worker];
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
  }
  if (pthread_create(&thread, &attributes, work, task)) {
    fprintf(stderr, "the C loop cannot start a thread on CPU %d\n", cpu);
    exit(EXIT_FAILURE);  // others wait for it already
  }
  pthread_attr_destroy(&attributes);
  return thread;
}

// Model and memory of every worker; NULL where the model cannot be read.
Loop* loop_open(const char* path, int workers, const int* cpus) {
  mjModel* model = mj_loadModel(path, NULL);
  if (!model) return NULL;
  Loop* loop = malloc(sizeof *loop);
  loop->workers = workers;
  loop->cpus = malloc((size_t)workers * sizeof *loop->cpus);
  loop->models = malloc((size_t)workers * sizeof *loop->models);
  loop->datas = malloc((size_t)workers * sizeof *loop->datas);
  for (int i = 0; i < workers; i++) {
    loop->cpus[i] = cpus[i];
    loop->models[i] = i ? mj_copyModel(NULL, model) : model;
    loop->datas[i] = mj_makeData(model);
  }
  return loop;
}

// Step every snapshot once, one after the other, each as one batch.
void loop_round(const Loop* loop, int snapshots, int envs, int decimation, const mjtNum* states, const mjtNum* kp,
                const mjtNum* kd, mjtNum* out, double* seconds) {
  Round round = {loop, snapshots, envs, decimation, states, kp, kd, out, seconds, NULL};
  round.next = calloc((size_t)snapshots, sizeof *round.next);
  pthread_barrier_init(&round.barrier, NULL, (unsigned)loop->workers);
  pthread_t* threads = malloc((size_t)loop->workers * sizeof *threads);
  Task* tasks = malloc((size_t)loop->workers * sizeof *tasks);
  for (int i = 0; i < loop->workers; i++) {
    tasks[i] = (Task){&round, i};
    threads[i] = start(&tasks[i]);
  }
  for (int i = 0; i < loop->workers; i++) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&round.barrier);
  free(tasks);
  free(threads);
  free(round.next);
}

void loop_close(Loop* loop) {
  for (int i = 0; i < loop->workers; i++) {
    mj_deleteData(loop->datas[i]);
    mj_deleteModel(loop->models[i]);
  }
  free(loop->datas);
  free(loop->models);
  free(loop->cpus);
  free(loop);
}
