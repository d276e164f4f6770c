// C++'s operators over jemalloc: the crate builds it without its own. The C++ library's would reach malloc as
// well, by one call more, and would free without the size.
#include <cstddef>
#include <cstdlib>
#include <new>

extern "C" void sdallocx(void *memory, std::size_t size, int flags) noexcept;
extern "C" void *aligned_alloc(std::size_t alignment, std::size_t size) noexcept;

namespace {

void *take(std::size_t size, std::size_t alignment) noexcept {
    return alignment ? aligned_alloc(alignment, size) : std::malloc(size);
}

// What the standard wants where memory is short: the program's handler frees some, or throws.
[[gnu::cold, gnu::noinline]] void *insist(std::size_t size, std::size_t alignment) {
    for (;;) {
        std::new_handler handler = std::get_new_handler();
        if (handler == nullptr)
            throw std::bad_alloc();
        handler();
        if (void *memory = take(size, alignment))
            return memory;
    }
}

inline void *get(std::size_t size, std::size_t alignment = 0) {
    void *memory = take(size, alignment);
    return __builtin_expect(memory != nullptr, 1) ? memory : insist(size, alignment);
}

inline void *try_get(std::size_t size, std::size_t alignment = 0) noexcept {
    try {
        return get(size, alignment);
    } catch (...) {
        return nullptr;
    }
}

inline void give(void *memory, std::size_t size) noexcept {
    if (memory != nullptr)
        sdallocx(memory, size, 0);
}

constexpr std::size_t number(std::align_val_t alignment) {
    return static_cast<std::size_t>(alignment);
}

} // namespace

void *operator new(std::size_t size) {
    return get(size);
}

void *operator new[](std::size_t size) {
    return get(size);
}

void *operator new(std::size_t size, const std::nothrow_t &) noexcept {
    return try_get(size);
}

void *operator new[](std::size_t size, const std::nothrow_t &) noexcept {
    return try_get(size);
}

void *operator new(std::size_t size, std::align_val_t alignment) {
    return get(size, number(alignment));
}

void *operator new[](std::size_t size, std::align_val_t alignment) {
    return get(size, number(alignment));
}

void *operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t &) noexcept {
    return try_get(size, number(alignment));
}

void *operator new[](std::size_t size, std::align_val_t alignment, const std::nothrow_t &) noexcept {
    return try_get(size, number(alignment));
}

void operator delete(void *memory) noexcept {
    std::free(memory);
}

void operator delete[](void *memory) noexcept {
    std::free(memory);
}

void operator delete(void *memory, const std::nothrow_t &) noexcept {
    std::free(memory);
}

void operator delete[](void *memory, const std::nothrow_t &) noexcept {
    std::free(memory);
}

void operator delete(void *memory, std::size_t size) noexcept {
    give(memory, size);
}

void operator delete[](void *memory, std::size_t size) noexcept {
    give(memory, size);
}

// Alignment may have made the block larger than its size says.
void operator delete(void *memory, std::align_val_t) noexcept {
    std::free(memory);
}

void operator delete[](void *memory, std::align_val_t) noexcept {
    std::free(memory);
}

void operator delete(void *memory, std::align_val_t, const std::nothrow_t &) noexcept {
    std::free(memory);
}

void operator delete[](void *memory, std::align_val_t, const std::nothrow_t &) noexcept {
    std::free(memory);
}

void operator delete(void *memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}

void operator delete[](void *memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}
