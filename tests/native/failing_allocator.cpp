// Fails chosen allocations of C++ code. test_allocation.py preloads it (LD_PRELOAD) into a process of its own; nothing
// that is shipped knows of it. Python's own objects come from elsewhere and are not concerned.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> left{-1};         // allocations that still succeed; -1: all do
std::atomic<bool> persists{false};  // whether those after the first failure fail, too
std::atomic<bool> fired{false};

bool fails() {
    long n = left.load();
    while (n >= 0) {
        if (!left.compare_exchange_weak(n, n == 0 && persists ? 0 : n - 1)) continue;
        if (n == 0) fired = true;
        return n == 0;
    }
    return false;
}

template <class Function>
Function next(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

void* allocate(std::size_t size, std::size_t alignment) {
    if (fails()) return nullptr;
    if (alignment == 0) return std::malloc(size == 0 ? 1 : size);
    void* p = nullptr;
    return posix_memalign(&p, alignment, size == 0 ? 1 : size) == 0 ? p : nullptr;
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
    void* p = allocate(size, alignment);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

}  // namespace

extern "C" {

// Lets `n` more allocations succeed; the next one fails, and with `then_all` also those after it.
void fail_after(long n, bool then_all) {
    fired = false;
    persists = then_all;
    left = n;
}

// From here on all succeed. Returns whether one has failed.
bool end_failing() {
    left = -1;
    return fired;
}

void* aligned_alloc(std::size_t alignment, std::size_t size) {
    static const auto real = next<void* (*)(std::size_t, std::size_t)>("aligned_alloc");
    return fails() ? nullptr : real(alignment, size);
}

void* mmap(void* address, std::size_t size, int protection, int flags, int file, off_t offset) {
    static const auto real = next<void* (*)(void*, std::size_t, int, int, int, off_t)>("mmap");
    constexpr std::size_t kLarge = 4 << 20;  // Python's arenas are smaller
    if (size >= kLarge && file == -1 && fails()) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return real(address, size, protection, flags, file, offset);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const auto real = next<Create>("pthread_create");
    return fails() ? EAGAIN : real(thread, attributes, start, argument);
}

}  // extern "C"

void* operator new(std::size_t size) { return allocate_or_throw(size, 0); }
void* operator new[](std::size_t size) { return allocate_or_throw(size, 0); }
void* operator new(std::size_t size, std::align_val_t a) { return allocate_or_throw(size, std::size_t(a)); }
void* operator new[](std::size_t size, std::align_val_t a) { return allocate_or_throw(size, std::size_t(a)); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, 0); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, 0); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
