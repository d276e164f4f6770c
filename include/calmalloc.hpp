// calmalloc for C++ containers (C++17 and later): calm::allocator<T>, as std::allocator is, and
// calm::memory_resource, for std::pmr.
//
//     std::vector<int, calm::allocator<int>> numbers;
//     std::pmr::string text("text", calm::resource());
//
// In a program that links the library, std::allocator is served by it already, unless another malloc comes
// first: one that is preloaded, or a sanitizer's. These are calmalloc's in any case. Link with -lcalmalloc.
//
// Everything here is thread-safe, as calm_malloc is, and holds no state: all objects of a kind are equal, and
// what one allocated another may free. Sizes and alignments are in bytes where not said otherwise. Where
// there is no memory, the program's new-handler is called, until there is some or no handler is set; then
// std::bad_alloc is thrown (std::abort is called, where exceptions are off).
#ifndef CALMALLOC_HPP
#define CALMALLOC_HPP

// A structure and a function of one name, as C allows, are to g++ a shadow.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#include "calmalloc.h"
#pragma GCC diagnostic pop

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>

#if __has_include(<memory_resource>)
#include <memory_resource>
#endif

namespace calm {

namespace detail {

// The alignment of every block, asked for or not.
inline constexpr std::size_t aligned_always = 16;

[[noreturn]] inline void throw_bad_alloc() {
#if defined(__cpp_exceptions)
    throw std::bad_alloc();
#else
    std::abort();
#endif
}

[[noreturn]] inline void throw_bad_array_new_length() {
#if defined(__cpp_exceptions)
    throw std::bad_array_new_length();
#else
    std::abort();
#endif
}

// The alignment is a power of two.
[[nodiscard]] inline void *allocate(std::size_t bytes, std::size_t alignment) {
    for (;;) {
        void *block = alignment <= aligned_always ? calm_malloc(bytes) : calm_aligned_alloc(alignment, bytes);
        if (block != nullptr) {
            return block;
        }
        const std::new_handler handler = std::get_new_handler();
        if (handler == nullptr) {
            throw_bad_alloc();
        }
        handler();
    }
}

inline void deallocate(void *block, std::size_t bytes, std::size_t alignment) noexcept {
    if (alignment <= aligned_always) {
        calm_free_sized(block, bytes);
    } else {
        calm_free_aligned_sized(block, alignment, bytes);
    }
}

} // namespace detail

// An allocator (the standard's named requirement) of objects of T, which may be over-aligned.
template <class T> class allocator {
  public:
    using value_type = T;
    using size_type = std::size_t;
    using difference_type = std::ptrdiff_t;
    using propagate_on_container_copy_assignment = std::true_type;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;
    using is_always_equal = std::true_type;

    constexpr allocator() noexcept = default;
    constexpr allocator(const allocator &) noexcept = default;
    template <class U> constexpr allocator(const allocator<U> &) noexcept {
    }
    constexpr allocator &operator=(const allocator &) noexcept = default;
    ~allocator() = default;

    // Room for so many objects; of none, a block all the same. Throws std::bad_array_new_length for more than
    // max_size(), std::bad_alloc where there is no memory, and what the new-handler throws.
    [[nodiscard]] T *allocate(std::size_t objects) {
        if (objects > max_size()) {
            detail::throw_bad_array_new_length();
        }
        return static_cast<T *>(detail::allocate(objects * sizeof(T), alignof(T)));
    }

    // A block of allocate(objects), of this allocator's or another calm::allocator's.
    void deallocate(T *block, std::size_t objects) noexcept {
        detail::deallocate(block, objects * sizeof(T), alignof(T));
    }

    // The most objects that can be asked for.
    [[nodiscard]] static constexpr std::size_t max_size() noexcept {
        return static_cast<std::size_t>(PTRDIFF_MAX) / sizeof(T);
    }
};

template <class T, class U>
[[nodiscard]] constexpr bool operator==(const allocator<T> &, const allocator<U> &) noexcept {
    return true;
}

template <class T, class U>
[[nodiscard]] constexpr bool operator!=(const allocator<T> &, const allocator<U> &) noexcept {
    return false;
}

#if defined(__cpp_lib_memory_resource)

// A memory resource over calm_malloc. All of its kind are equal, and equal to no other.
class CALM_API memory_resource final : public std::pmr::memory_resource {
  protected:
    // The alignment is a power of two. Throws std::bad_alloc, and what the new-handler throws.
    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
        if (bytes > static_cast<std::size_t>(PTRDIFF_MAX)) {
            detail::throw_bad_alloc();
        }
        return detail::allocate(bytes, alignment);
    }

    void do_deallocate(void *block, std::size_t bytes, std::size_t alignment) noexcept override {
        detail::deallocate(block, bytes, alignment);
    }

    [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
#if defined(__cpp_rtti)
        return dynamic_cast<const memory_resource *>(&other) != nullptr;
#else
        return this == &other;
#endif
    }
};

// The process's own. It is never destroyed: containers that outlive main may use it.
[[nodiscard]] inline memory_resource *resource() noexcept {
    alignas(memory_resource) static unsigned char room[sizeof(memory_resource)];
    static memory_resource *const one = ::new (static_cast<void *>(room)) memory_resource;
    return one;
}

#endif

} // namespace calm

#endif
