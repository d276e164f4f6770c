// The containers of calmalloc.hpp at work. Each case is named on the command line, with "beside" behind it
// where the program's malloc is not calmalloc's.
#include "calmalloc.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <numeric>
#include <scoped_allocator>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                       \
        }                                                                        \
    } while (0)

namespace {

constexpr std::size_t MIB = std::size_t{1} << 20;
constexpr auto MOST = static_cast<std::size_t>(PTRDIFF_MAX);

template <class T> using vector = std::vector<T, calm::allocator<T>>;
template <class K, class V> using map = std::map<K, V, std::less<K>, calm::allocator<std::pair<const K, V>>>;
using string = std::basic_string<char, std::char_traits<char>, calm::allocator<char>>;

struct hash_of_string {
    std::size_t operator()(const string &text) const noexcept {
        return std::hash<std::string_view>()({text.data(), text.size()});
    }
};
template <class V>
using unordered_map = std::unordered_map<string, V, hash_of_string, std::equal_to<string>,
                                         calm::allocator<std::pair<const string, V>>>;

template <std::size_t alignment> struct alignas(alignment) aligned { std::uint64_t number; };

// The program's malloc is another.
bool is_beside;

bool is_calmallocs(const void *block) {
    return calm_malloc_usable_size(block) > 0;
}

bool is_aligned(const void *block, std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(block) % alignment == 0;
}

struct calm_stats stats() {
    struct calm_stats now;
    CHECK(calm_stats(&now, sizeof now) == 0);
    return now;
}

// What the optimizer must not see through.
template <class T> T opaque(T value) {
    volatile T kept = value;
    return kept;
}

std::string word(int i) {
    return "a word too long for the string itself, number " + std::to_string(i);
}

void containers() {
    vector<int> numbers;
    for (int i = 0; i < 100000; i++) {
        numbers.push_back(i);
    }
    CHECK(is_calmallocs(numbers.data()));
    CHECK(std::accumulate(numbers.begin(), numbers.end(), 0LL) == 4999950000LL);

    map<int, string> ordered;
    unordered_map<int> hashed;
    std::map<int, std::string> ordered_model;
    for (int i = 0; i < 20000; i++) {
        const int key = i * 7919 % 5003;
        ordered[key] = word(i).c_str();
        ordered_model[key] = word(i);
        hashed[word(key).c_str()] = i;
        if (i % 3 == 0) {
            ordered.erase(key / 2);
            ordered_model.erase(key / 2);
        }
    }
    CHECK(ordered.size() == ordered_model.size() && hashed.size() == 5003);
    for (const auto &[key, text] : ordered_model) {
        const string &found = ordered.at(key);
        CHECK(found == text.c_str() && is_calmallocs(found.data()));
        CHECK(is_calmallocs(&found));
        CHECK(hashed.count(word(key).c_str()) == 1);
    }

    std::list<string, calm::allocator<string>> list(1000, string(word(1).c_str()));
    std::deque<long, calm::allocator<long>> deque(100000, 3);
    std::set<int, std::less<>, calm::allocator<int>> set{3, 1, 2};
    CHECK(std::accumulate(deque.begin(), deque.end(), 0L) == 300000);
    CHECK(is_calmallocs(&list.front()) && is_calmallocs(&deque.front()) && is_calmallocs(&*set.begin()));

    vector<int> copy = numbers;
    vector<int> moved = std::move(numbers);
    CHECK(copy == moved && copy.data() != moved.data());
    const int *data = moved.data();
    copy = std::move(moved);
    CHECK(copy.data() == data);
    vector<int> other{1, 2};
    swap(copy, other);
    CHECK(other.data() == data && copy.size() == 2);

    auto shared = std::allocate_shared<std::string>(calm::allocator<char>(), word(5));
    CHECK(*shared == word(5));

    using nested = std::vector<vector<int>, std::scoped_allocator_adaptor<calm::allocator<vector<int>>>>;
    nested rows(10);
    rows.emplace_back(100, 7);
    CHECK(rows.back().size() == 100 && is_calmallocs(rows.back().data()));
}

// The counters know of it, and of nothing else's.
void served() {
    const auto before = stats();
    {
        vector<char> large(64 * MIB, 1);
        const auto during = stats();
        CHECK(calm_malloc_usable_size(large.data()) >= 64 * MIB);
        CHECK(during.in_use >= before.in_use + 64 * MIB);
        CHECK(during.large_allocations > before.large_allocations);
    }
    CHECK(stats().in_use < before.in_use + MIB);
    {
        const std::pmr::vector<char> large(64 * MIB, 1, calm::resource());
        CHECK(stats().in_use >= before.in_use + 64 * MIB);
    }
    const auto misses = stats().cache_misses;
    map<int, int> small;
    for (int i = 0; i < 10000; i++) {
        small[i] = i;
    }
    CHECK(stats().cache_misses > misses);

    const std::vector<int> of_std(1000);
    const auto in_use = stats().in_use;
    const std::vector<char> large_of_std(64 * MIB, 1);
    CHECK(is_calmallocs(of_std.data()) == !is_beside && is_calmallocs(large_of_std.data()) == !is_beside);
    CHECK(is_beside ? stats().in_use < in_use + MIB : stats().in_use >= in_use + 64 * MIB);
}

template <std::size_t alignment> void over_aligned_to() {
    vector<aligned<alignment>> many;
    map<int, aligned<alignment>> nodes;
    std::pmr::vector<aligned<alignment>> of_pmr(calm::resource());
    for (std::uint64_t i = 0; i < 300; i++) {
        many.push_back({i});
        of_pmr.push_back({i});
        nodes[static_cast<int>(i)].number = i;
        CHECK(is_aligned(many.data(), alignment) && is_aligned(of_pmr.data(), alignment));
        CHECK(is_aligned(&nodes[static_cast<int>(i)], alignment));
    }
    for (std::uint64_t i = 0; i < 300; i++) {
        CHECK(many[i].number == i && of_pmr[i].number == i && nodes[static_cast<int>(i)].number == i);
    }
}

void over_aligned() {
    over_aligned_to<8>();
    over_aligned_to<16>();
    over_aligned_to<32>();
    over_aligned_to<64>();
    over_aligned_to<4096>();
    over_aligned_to<65536>();
    for (std::size_t alignment = 1; alignment <= 4 * MIB; alignment *= 2) {
        for (const std::size_t bytes :
             {std::size_t{0}, std::size_t{1}, std::size_t{100}, std::size_t{40000}}) {
            void *block = calm::resource()->allocate(bytes, alignment);
            CHECK(block != nullptr && is_aligned(block, alignment));
            CHECK(calm_malloc_usable_size(block) >= bytes);
            std::memset(block, 0x5C, bytes);
            calm::resource()->deallocate(block, bytes, alignment);
        }
    }
}

void pmr() {
    auto *resource = calm::resource();
    CHECK(resource == calm::resource());
    calm::memory_resource another;
    CHECK(*resource == another && another.is_equal(*resource) && &another != resource);
    CHECK(*resource != *std::pmr::new_delete_resource() && *std::pmr::null_memory_resource() != another);

    std::pmr::string text(word(1).c_str(), resource);
    CHECK(is_calmallocs(text.data()) && text == word(1).c_str());
    std::pmr::map<int, std::pmr::string> ordered(resource);
    std::pmr::unordered_map<std::pmr::string, int> hashed(resource);
    for (int i = 0; i < 5000; i++) {
        ordered[i] = word(i).c_str();
        hashed.emplace(word(i).c_str(), i);
    }
    for (int i = 0; i < 5000; i++) {
        CHECK(ordered[i] == word(i).c_str() && hashed.at(std::pmr::string(word(i).c_str(), resource)) == i);
        CHECK(is_calmallocs(ordered[i].data())); // The resource goes down into the elements.
    }

    // Resources that are equal: moved between, not copied.
    std::pmr::vector<int> from(1000, 7, resource);
    const int *data = from.data();
    const std::pmr::vector<int> to(std::move(from), &another);
    CHECK(to.data() == data);

    std::pmr::monotonic_buffer_resource buffer(64, resource);
    std::pmr::unsynchronized_pool_resource pool(resource);
    const std::pmr::vector<int> in_buffer(1000, 1, &buffer);
    const std::pmr::vector<int> in_pool(10, 1, &pool);
    CHECK(in_buffer.size() == 1000 && in_pool.size() == 10);
    CHECK(buffer.upstream_resource() == resource && pool.upstream_resource() == resource);

    std::pmr::set_default_resource(resource);
    const std::pmr::vector<int> by_default(100);
    CHECK(by_default.get_allocator().resource() == resource && is_calmallocs(by_default.data()));
    std::pmr::set_default_resource(nullptr);
}

template <class Exception, class Action> bool throws(Action action) {
    try {
        action();
    } catch (const Exception &) {
        return true;
    }
    return false;
}

int handled;

void handler() {
    if (++handled == 3) {
        std::set_new_handler(nullptr);
    }
}

void failures() {
    calm::allocator<std::uint64_t> eights;
    calm::allocator<aligned<64>> aligned_ones;
    const auto most = opaque(MOST);
    const auto all = opaque(std::numeric_limits<std::size_t>::max());
    using length = std::bad_array_new_length;
    CHECK(throws<length>([&] { (void)eights.allocate(all); }));
    CHECK(throws<length>([&] { (void)eights.allocate(most / 8 + 1); }));
    CHECK(throws<length>([&] { (void)eights.allocate(all / 8 + 2); })); // whose product is small
    CHECK(throws<length>([&] { (void)aligned_ones.allocate(all / 64 + 2); }));
    CHECK(throws<std::bad_alloc>([&] { (void)eights.allocate(most / 8); }));
    CHECK(!throws<length>([&] { CHECK(throws<std::bad_alloc>([&] { (void)eights.allocate(most / 8); })); }));
    CHECK(throws<std::bad_alloc>([&] { (void)aligned_ones.allocate(most / 64); }));
    CHECK(throws<std::length_error>([&] { vector<std::uint64_t>().reserve(most / 8 + 1); }));
    CHECK(throws<std::bad_alloc>([&] { vector<char>().reserve(most); }));

    CHECK(throws<std::bad_alloc>([&] { (void)calm::resource()->allocate(all); }));
    CHECK(throws<std::bad_alloc>([&] { (void)calm::resource()->allocate(all, 4096); }));
    CHECK(throws<std::bad_alloc>([&] { (void)calm::resource()->allocate(most, 64); }));
    CHECK(throws<std::bad_alloc>([&] { (void)calm::resource()->allocate(1, all / 2 + 1); }));

    // What was there before stays there.
    vector<int> kept{1, 2, 3};
    CHECK(throws<std::bad_alloc>([&] { kept.reserve(most / 4); }));
    CHECK(kept.size() == 3 && kept[2] == 3);

    std::set_new_handler(handler);
    CHECK(throws<std::bad_alloc>([&] { (void)eights.allocate(most / 8); }));
    CHECK(handled == 3);
    handled = 0;
    std::set_new_handler([] { throw std::runtime_error("handler"); });
    CHECK(throws<std::runtime_error>([&] { (void)calm::resource()->allocate(most); }));
    std::set_new_handler(nullptr);

    std::uint64_t *none = eights.allocate(0);
    CHECK(none != nullptr);
    eights.deallocate(none, 0);
}

struct incomplete;
struct tree {
    std::vector<tree, calm::allocator<tree>> children;
};

void requirements() {
    using ints = calm::allocator<int>;
    using traits = std::allocator_traits<ints>;
    static_assert(std::is_same_v<traits::value_type, int> && std::is_same_v<traits::pointer, int *>);
    static_assert(std::is_same_v<traits::rebind_alloc<long>, calm::allocator<long>>);
    static_assert(std::is_same_v<traits::size_type, std::size_t>);
    static_assert(traits::is_always_equal::value && std::is_empty_v<ints>);
    static_assert(traits::propagate_on_container_copy_assignment::value);
    static_assert(traits::propagate_on_container_move_assignment::value);
    static_assert(traits::propagate_on_container_swap::value);
    static_assert(std::is_nothrow_default_constructible_v<ints> &&
                  std::is_nothrow_copy_constructible_v<ints>);
    static_assert(std::is_nothrow_constructible_v<ints, const calm::allocator<long> &>);
    static_assert(std::is_nothrow_copy_assignable_v<ints> && std::is_trivially_destructible_v<ints>);
    static_assert(noexcept(std::declval<ints &>().deallocate(nullptr, 1)));
    static_assert(!noexcept(std::declval<ints &>().allocate(1)));
    static_assert(noexcept(calm::resource()));
    static_assert(std::is_nothrow_move_assignable_v<vector<int>> && std::is_nothrow_swappable_v<vector<int>>);
    static_assert(ints::max_size() == MOST / sizeof(int));
    CHECK(traits::max_size(ints()) == ints::max_size());
    static_assert(sizeof(vector<int>) == sizeof(std::vector<int>));

    constexpr ints one;
    constexpr calm::allocator<long> other(one);
    static_assert(one == ints() && !(one != ints()) && one == other && other == one && !(one != other));
    CHECK(traits::select_on_container_copy_construction(one) == one);

    // Of what no object can be, or cannot be yet.
    constexpr calm::allocator<void> of_void(one);
    constexpr calm::allocator<incomplete> of_incomplete(of_void);
    CHECK(of_void == one && of_incomplete == of_void);
    using rebound = std::allocator_traits<calm::allocator<void>>::rebind_alloc<int>;
    static_assert(std::is_same_v<rebound, ints>);
    tree root;
    root.children.resize(3);
    CHECK(is_calmallocs(root.children.data()));

    // One allocates, another of another type frees.
    calm::allocator<long> longs(one);
    long *block = longs.allocate(4);
    calm::allocator<long>(ints(longs)).deallocate(block, 4);

    ints all;
    int *numbers = traits::allocate(all, 10);
    traits::construct(all, numbers, 42);
    CHECK(*numbers == 42 && is_calmallocs(numbers));
    traits::destroy(all, numbers);
    traits::deallocate(all, numbers, 10);
}

// Each thread's strings are freed by the next.
void threads() {
    constexpr int THREADS = 8;
    using strings = vector<string>;
    std::vector<strings> made(THREADS);
    const auto each = [](auto action) {
        std::vector<std::thread> all;
        for (int i = 0; i < THREADS; i++) {
            all.emplace_back(action, i);
        }
        for (auto &thread : all) {
            thread.join();
        }
    };
    for (int round = 0; round < 5; round++) {
        each([&](int me) {
            std::pmr::map<int, std::pmr::string> scratch(calm::resource());
            for (int i = 0; i < 5000; i++) {
                made[static_cast<std::size_t>(me)].emplace_back(word(me * 5000 + i).c_str());
                scratch[i % 777] = word(i).c_str();
            }
            for (int i = 5000 - 777; i < 5000; i++) {
                CHECK(scratch[i % 777] == word(i).c_str());
            }
        });
        each([&](int me) {
            const int before = (me + 1) % THREADS;
            strings mine = std::exchange(made[static_cast<std::size_t>(before)], {});
            for (int i = 0; i < 5000; i++) {
                CHECK(mine[static_cast<std::size_t>(i)] == word(before * 5000 + i).c_str());
            }
        });
    }
}

const struct {
    const char *name;
    void (*run)();
} cases[] = {
    {"containers", containers},     {"served", served},
    {"over-aligned", over_aligned}, {"pmr", pmr},
    {"failures", failures},         {"requirements", requirements},
    {"threads", threads},
};

// Destroyed after main: its memory must outlive it, and so must the resource.
const std::pmr::vector<int> outlives_main(1000, 7, calm::resource());

} // namespace

int main(int argc, char **argv) {
    CHECK(outlives_main.size() == 1000);
    is_beside = argc == 3 && std::strcmp(argv[2], "beside") == 0;
    for (const auto &one : cases) {
        if (argc == 2 + is_beside && std::strcmp(argv[1], one.name) == 0) {
            one.run();
            std::puts("done");
            return 0;
        }
    }
    std::fprintf(stderr, "no such case\n");
    return 2;
}
