// A fixed team of threads that run one function together and meet at barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace segue {

// CPUs this process may use: its affinity mask and its control group's quota.
int available_cpus();

// A lock that a forked child finds open: who held it did not come along.
class ProcessLock {
   public:
    void lock();
    void unlock();

   private:
    std::atomic<int> holder_{0};  // the process that holds it; 0: none
};

// The calling thread is thread 0 of every run. Who waits, for a run or for the others in it, spins for a moment and
// then sleeps: an idle pool costs nothing, and on a busy machine those that have work get the CPU. With more threads
// than CPUs nobody spins. Threads start at the first run, and again in a child that was forked since.
class ThreadPool {
   public:
    explicit ThreadPool(int threads);
    // The one pool of this many threads that the models of a process share, while any of them has it.
    static std::shared_ptr<ThreadPool> shared(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread, thread in [0, size), and returns when all are done. body must not throw, and
    // not run another. Calls from several threads take turns.
    // Raises CapacityError when the system gives no thread.
    template <class Body>
    void run(const Body& body) {
        run_on_all([](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); }, &body);
    }

    // Inside run(): returns when every thread of the run has called it; what they wrote before is then visible.
    void barrier();

   private:
    using Task = void (*)(const void* context, int thread);
    struct State;

    void run_on_all(Task task, const void* context);
    void start();
    void stop();

    int size_;
    ProcessLock running_;
    State* state_ = nullptr;
    std::vector<std::thread> workers_;
};

}  // namespace segue
