#include "thread_pool.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common.hpp"

namespace segue {
namespace {

constexpr int kSpins = 2000;
constexpr auto kAwake = std::chrono::microseconds(500);

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns once done(value) holds for the value of `word`. Whoever makes it hold must notify `word`, and must have
// changed it by a sequentially consistent operation: only then is no sleeper missed.
template <class T, class Done>
void wait_until(const std::atomic<T>& word, bool spins, const Done& done) {
    const auto is_done = [&] { return done(word.load(std::memory_order_acquire)); };
    if (spins) {
        for (int i = 0; i < kSpins; ++i) {
            if (is_done()) return;
            relax();
        }
        // A virtual CPU that another thread needs may be this one.
        const auto sleep_at = std::chrono::steady_clock::now() + kAwake;
        while (std::chrono::steady_clock::now() < sleep_at) {
            if (is_done()) return;
            sched_yield();
        }
    }
    while (true) {
        const T value = word.load(std::memory_order_acquire);
        if (done(value)) return;
        word.wait(value, std::memory_order_acquire);
    }
}

// CPUs that the control group's quota comes to (version 2, then 1); `most` without one.
int quota_cpus(int most) {
    std::ifstream v2("/sys/fs/cgroup/cpu.max");
    std::string quota;
    double period = 0;
    if (v2 >> quota >> period && quota != "max" && period > 0) {
        return std::max(1, static_cast<int>(std::ceil(std::stod(quota) / period)));
    }
    std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    std::ifstream v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    double quota_us = 0;
    if (v1_quota >> quota_us && v1_period >> period && quota_us > 0 && period > 0) {
        return std::max(1, static_cast<int>(std::ceil(quota_us / period)));
    }
    return most;
}

}  // namespace

int available_cpus() {
    int cpus = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) cpus = std::max(1, CPU_COUNT(&allowed));
#endif
    return std::min(cpus, quota_cpus(cpus));
}

// What the threads share. Each counter has a cache line of its own.
struct ThreadPool::State {
    alignas(64) std::atomic<uint32_t> epoch{0};  // goes up with every run
    alignas(64) std::atomic<int> running{0};     // workers that have not finished the run
    alignas(64) std::atomic<int> arrived{0};     // threads at the barrier
    alignas(64) std::atomic<uint32_t> barrier_epoch{0};
    alignas(64) std::atomic<bool> stopping{false};
    Task task = nullptr;
    const void* context = nullptr;
    pid_t owner = getpid();
    bool spins;

    explicit State(bool spins) : spins(spins) {}

    void work(int thread) {
        uint32_t seen = 0;
        while (true) {
            wait_until(epoch, spins, [&](uint32_t now) { return now != seen; });
            seen = epoch.load(std::memory_order_acquire);
            if (stopping.load(std::memory_order_relaxed)) return;
            task(context, thread);
            if (running.fetch_sub(1, std::memory_order_seq_cst) == 1) running.notify_all();
        }
    }

    void begin_run() {
        epoch.fetch_add(1, std::memory_order_seq_cst);
        epoch.notify_all();
    }
};

void ProcessLock::lock() {
    const int self = getpid();
    for (int seen = 0; !holder_.compare_exchange_weak(seen, self, std::memory_order_acquire);) {
        // What it was is in `seen` now. Another process than this one is its parent: the next try takes it over.
        if (seen != self) continue;
        holder_.wait(self, std::memory_order_relaxed);
        seen = 0;
    }
}

void ProcessLock::unlock() {
    holder_.store(0, std::memory_order_release);
    holder_.notify_one();
}

std::shared_ptr<ThreadPool> ThreadPool::shared(int threads) {
    static ProcessLock lock;
    static std::map<int, std::weak_ptr<ThreadPool>> pools;  // by their threads
    const std::lock_guard guard(lock);
    std::weak_ptr<ThreadPool>& known = pools[threads];
    std::shared_ptr<ThreadPool> pool = known.lock();
    if (pool == nullptr) known = pool = std::make_shared<ThreadPool>(threads);
    return pool;
}

ThreadPool::ThreadPool(int threads) : size_(threads) {}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    if (state_ == nullptr) return;
    if (state_->owner == getpid()) {
        state_->stopping.store(true, std::memory_order_relaxed);
        state_->begin_run();
        for (std::thread& worker : workers_) worker.join();
        delete state_;
    } else {
        // After a fork: the threads did not come along, and the parent's state is as the fork found it.
        for (std::thread& worker : workers_) worker.detach();
    }
    workers_.clear();
    state_ = nullptr;
}

void ThreadPool::start() {
    stop();
    workers_.reserve(static_cast<size_t>(size_ - 1));
    state_ = new State(size_ <= available_cpus());
    try {
        for (int thread = 1; thread < size_; ++thread) {
            workers_.emplace_back([state = state_, thread] { state->work(thread); });
        }
    } catch (const std::system_error& error) {
        stop();
        throw CapacityError("cannot start " + std::to_string(size_) + " threads (" + error.code().message() +
                            "): lower threads");
    } catch (...) {
        stop();
        throw;
    }
}

void ThreadPool::run_on_all(Task task, const void* context) {
    if (size_ == 1) return task(context, 0);
    const std::lock_guard guard(running_);
    if (state_ == nullptr || state_->owner != getpid()) start();
    state_->task = task;
    state_->context = context;
    state_->running.store(size_ - 1, std::memory_order_relaxed);
    state_->begin_run();
    task(context, 0);
    wait_until(state_->running, state_->spins, [](int running) { return running == 0; });
}

void ThreadPool::barrier() {
    if (size_ == 1) return;
    State& s = *state_;
    const uint32_t epoch = s.barrier_epoch.load(std::memory_order_relaxed);
    if (s.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        s.arrived.store(0, std::memory_order_relaxed);
        s.barrier_epoch.store(epoch + 1, std::memory_order_seq_cst);
        s.barrier_epoch.notify_all();
    } else {
        wait_until(s.barrier_epoch, s.spins, [&](uint32_t now) { return now != epoch; });
    }
}

}  // namespace segue
