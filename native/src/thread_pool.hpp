// A fixed team of threads that run one function together and meet at barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace segue {

// CPUs this process may use: its affinity mask and its control group's quota.
int available_cpus();

// The calling thread is thread 0 of every run. Who waits, for a run or for the others in it, spins for a moment and
// then sleeps: an idle pool costs nothing, and on a busy machine those that have work get the CPU. With more threads
// than CPUs nobody spins. Threads start at the first run, and again in a child that was forked since.
class ThreadPool {
   public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread, thread in [0, size), and returns when all are done. body must not throw.
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
    State* state_ = nullptr;
    std::vector<std::thread> workers_;
};

}  // namespace segue
