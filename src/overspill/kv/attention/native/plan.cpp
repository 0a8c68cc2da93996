#include "plan.h"

#include <algorithm>
#include <cmath>

namespace overspill {

namespace {

// Each chunk's result is written once and read once, so chunks must not be too small; but many chunks keep all threads
// busy to the end.
constexpr int64_t kChunksPerSegment = 64;
constexpr int64_t kLeastBytes = 128 << 10, kMostBytes = 1 << 20, kBytesPerResultByte = 4;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

const Kernel* choose(const OverspillLayout& layout, int rows, const Kernel* forced) {
    const auto is_best = [&](const Kernel& kernel) { return !kernel.least_rows || rows >= kernel.least_rows(layout); };
    for (int i = 0; kKernels[i]; i++) {
        const Kernel& kernel = *kKernels[i];
        if (runs_here(i) && kernel.suits(layout) && (forced ? forced == &kernel : is_best(kernel))) return &kernel;
    }
    return nullptr;
}

}  // namespace

std::string objection(const OverspillJob& job) {
    const OverspillLayout& layout = *job.layout;
    if (layout.head_size < 16 || layout.head_size > kMaxHeadSize || layout.head_size % 16)
        return "head size " + std::to_string(layout.head_size) + " is not a multiple of 16 up to " +
               std::to_string(kMaxHeadSize);
    if (layout.kv_type < kBf16 || layout.kv_type > kFp32) return "unknown type of KV " + std::to_string(layout.kv_type);
    if (layout.query_type != kBf16 && layout.query_type != kFp16 && layout.query_type != kFp32)
        return "unknown type of queries " + std::to_string(layout.query_type);
    if (layout.block_size < 1 || layout.kv_heads < 1 || layout.group < 1 || job.num_queries < 0 || job.num_segments < 0)
        return "block size, heads and group must be positive";
    for (int i = 0; i < job.num_segments; i++) {
        const OverspillSegment& segment = job.segments[i];
        if (segment.num_queries < 1 || segment.num_blocks < 0)
            return "segment " + std::to_string(i) + " has no query, or a negative number of blocks";
        if (int64_t(segment.num_blocks) * layout.block_size > INT32_MAX)
            return "segment " + std::to_string(i) + " has more than 2^31 tokens";
        for (int j = 0; j < segment.num_blocks; j++)
            if (uint32_t(segment.blocks[j]) >= uint32_t(layout.num_blocks))
                return "segment " + std::to_string(i) + " names block " + std::to_string(segment.blocks[j]) + " of " +
                       std::to_string(layout.num_blocks);
        for (int j = 0; j < segment.num_queries; j++)
            if (uint32_t(segment.queries[j]) >= uint32_t(job.num_queries))
                return "segment " + std::to_string(i) + " names query " + std::to_string(segment.queries[j]) + " of " +
                       std::to_string(job.num_queries);
    }
    return "";
}

Plan make_plan(const OverspillJob& job, const Kernel* forced) {
    const OverspillLayout& layout = *job.layout;
    Plan plan;
    plan.layout = job.layout, plan.segments = job.segments;
    plan.num_segments = job.num_segments, plan.num_queries = job.num_queries;
    int most_rows = 0;
    for (int i = 0; i < job.num_segments; i++)
        most_rows = std::max(most_rows, job.segments[i].num_queries * layout.group);
    plan.kernel = choose(layout, most_rows, forced);
    if (!plan.kernel) return plan;

    const int width = plan.kernel->width(layout);
    const int64_t token_bytes = int64_t(layout.kv_heads) * layout.head_size * 2 * kTypeBytes[layout.kv_type];
    std::vector<std::vector<Part>> parts(job.num_queries);
    for (int i = 0; i < job.num_segments; i++) {
        const OverspillSegment& segment = job.segments[i];
        const int tokens = segment.num_blocks * layout.block_size;
        plan.bytes += tokens * token_bytes;
        const size_t floats = Result::floats(layout.kv_heads, segment.num_queries * layout.group, width);
        const int64_t result_bytes = kBytesPerResultByte * floats * sizeof(float);
        const int64_t bytes = std::clamp(tokens * token_bytes / kChunksPerSegment, std::max(kLeastBytes, result_bytes),
                                         std::max(kMostBytes, result_bytes));
        const int64_t whole = bytes / token_bytes, unit = whole >= layout.block_size ? layout.block_size : 1;
        const int64_t large = round_up(round_up(whole, unit), kStep),
                      small = round_up(round_up(whole / 4, unit), kStep);
        const int first = int(plan.chunks.size());
        // The last quarter is cut into smaller chunks, so that threads end together.
        for (int64_t at = 0; at < tokens;) {
            const int64_t end = std::min<int64_t>(tokens, at + (tokens - at > tokens / 4 ? large : small));
            plan.chunks.push_back({i, int32_t(at), int32_t(end), plan.result_floats});
            plan.result_floats += floats;
            at = end;
        }
        for (int j = 0; j < segment.num_queries; j++)
            parts[segment.queries[j]].push_back({i, first, int(plan.chunks.size()), j});
    }
    for (const auto& of_query : parts) {
        plan.first_part.push_back(int(plan.parts.size()));
        plan.parts.insert(plan.parts.end(), of_query.begin(), of_query.end());
    }
    plan.first_part.push_back(int(plan.parts.size()));
    plan.query_floats = size_t(layout.kv_heads) * round_up(most_rows, 16) * width;
    plan.state_floats = plan.kernel->state_floats(layout, most_rows);
    return plan;
}

void merge(const OverspillJob& job, const Plan& plan, const float* results, int query, int head) {
    const OverspillLayout& layout = *job.layout;
    const int heads = layout.kv_heads * layout.group, width = plan.kernel->width(layout);
    const auto each = [&](auto use) {
        for (int p = plan.first_part[query]; p < plan.first_part[query + 1]; p++) {
            const Part& part = plan.parts[p];
            const int rows = job.segments[part.segment].num_queries * layout.group;
            const int row = head / layout.group * rows + part.position * layout.group + head % layout.group;
            for (int c = part.first_chunk; c < part.end_chunk; c++)
                use(Result(const_cast<float*>(results) + plan.chunks[c].result, layout.kv_heads, rows), row);
        }
    };
    float reference = -INFINITY, total = 0;
    each([&](const Result& result, int row) { reference = std::max(reference, result.reference[row]); });
    alignas(64) float sums[kMaxHeadSize] = {};
    each([&](const Result& result, int row) {
        const float weight = exp2f(result.reference[row] - reference);
        const float* from = result.sums + size_t(row) * width;
        total += result.total[row] * weight;
        for (int d = 0; d < width; d++) sums[d] += from[d] * weight;
    });
    // Written so that a NaN among the keys or values reaches the output.
    const float factor = total == 0 ? 0 : job.value_scale * plan.kernel->value_factor(layout) / total;
    float* output = job.output + (size_t(query) * heads + head) * layout.head_size;
    const int16_t* order = plan.kernel->order(layout);
    for (int d = 0; d < layout.head_size; d++) output[d] = sums[order[d]] * factor;
    job.lse[size_t(head) * job.num_queries + query] =
        total == 0 ? -INFINITY : (reference + log2f(total)) * 0.693147180559945f;
}

}  // namespace overspill
