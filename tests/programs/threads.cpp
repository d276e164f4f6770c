// A threaded C++ program of the ordinary kind: containers, strings and shared objects that one thread makes
// and another destroys, in threads that come and go. Prints sums that depend on every value, and on no
// timing.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

struct Message {
    std::string text;
    std::vector<std::uint64_t> values;
    std::shared_ptr<Message> previous;
};

class Queue {
  public:
    void push(std::shared_ptr<Message> message) {
        {
            const std::lock_guard<std::mutex> guard(lock_);
            messages_.push_back(std::move(message));
        }
        filled_.notify_one();
    }

    std::shared_ptr<Message> pop() {
        std::unique_lock<std::mutex> guard(lock_);
        filled_.wait(guard, [this] { return !messages_.empty(); });
        auto message = std::move(messages_.front());
        messages_.pop_front();
        return message;
    }

  private:
    std::mutex lock_;
    std::condition_variable filled_;
    std::deque<std::shared_ptr<Message>> messages_;
};

std::uint64_t mix(std::uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    return value ^ (value >> 27);
}

void produce(Queue &queue, std::uint64_t seed, int count) {
    std::shared_ptr<Message> previous;
    for (int i = 0; i < count; i++) {
        auto message = std::make_shared<Message>();
        message->text.assign(mix(seed + i) % 3000, static_cast<char>('a' + i % 26));
        message->values.resize(mix(seed * 31 + i) % 500);
        std::iota(message->values.begin(), message->values.end(), seed + i);
        // Chains of up to 8 keep blocks alive across threads.
        message->previous = i % 8 != 0 ? previous : nullptr;
        previous = message;
        queue.push(std::move(message));
    }
    queue.push(nullptr);
}

void consume(Queue &queue, std::uint64_t &sum) {
    std::map<std::string, std::uint64_t> seen;
    while (auto message = queue.pop()) {
        auto key = message->text.substr(0, 40) + std::to_string(message->values.size());
        for (const Message *link = message.get(); link != nullptr; link = link->previous.get()) {
            seen[key] += link->text.size() + std::accumulate(link->values.begin(), link->values.end(), 0ULL);
        }
    }
    for (const auto &[key, value] : seen) {
        sum += mix(value + key.size());
    }
}

std::uint64_t pass_messages() {
    std::uint64_t sums[3] = {};
    Queue queues[3];
    std::vector<std::thread> threads;
    for (int pair = 0; pair < 3; pair++) {
        threads.emplace_back(produce, std::ref(queues[pair]), pair + 1, 20000);
        threads.emplace_back(consume, std::ref(queues[pair]), std::ref(sums[pair]));
    }
    for (auto &thread : threads) {
        thread.join();
    }
    return sums[0] ^ sums[1] ^ sums[2];
}

// What a thread leaves behind outlives it, and is freed by a later one.
std::uint64_t churn_threads() {
    std::atomic<std::uint64_t> sum{0};
    std::vector<std::vector<std::string>> left(4);
    for (int generation = 0; generation < 400; generation++) {
        std::thread([&left, &sum, generation] {
            std::unordered_map<int, std::string> table;
            for (int i = 0; i < 300; i++) {
                table[i].assign(mix(generation * 1000 + i) % 4000, static_cast<char>(generation));
            }
            for (const auto &[key, text] : table) {
                sum += mix(key + text.size()) % 1000;
            }
            auto &mine = left[generation % left.size()];
            for (const auto &text : mine) {
                sum += text.size() + static_cast<unsigned char>(text.empty() ? 0 : text.back());
            }
            mine.clear();
            for (int i = 0; i < 100; i++) {
                mine.push_back(std::move(table[i]));
            }
        }).join();
    }
    return sum;
}

// Large and growing blocks, in threads at once: the sizes that glibc serves by mmap, mremap and trimming.
std::uint64_t grow_vectors() {
    std::atomic<std::uint64_t> sum{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; thread++) {
        threads.emplace_back([&sum, thread] {
            for (int round = 0; round < 60; round++) {
                std::vector<std::vector<std::uint32_t>> rows(40);
                for (std::uint32_t i = 0; i < 200000; i++) {
                    rows[mix(i) % (1 + i % rows.size())].push_back(i ^ thread);
                }
                while (!rows.empty()) {
                    sum += std::accumulate(rows.back().begin(), rows.back().end(), std::uint64_t{0});
                    rows.pop_back();
                }
            }
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
    return sum;
}

} // namespace

int main() {
    std::printf("messages %016llx\n", static_cast<unsigned long long>(pass_messages()));
    std::printf("churn %016llx\n", static_cast<unsigned long long>(churn_threads()));
    std::printf("vectors %016llx\n", static_cast<unsigned long long>(grow_vectors()));
    return 0;
}
