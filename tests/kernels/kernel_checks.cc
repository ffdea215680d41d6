#include "tests/kernels/kernel_checks.h"

#include "tests/compress/values.h"

namespace thinwire {
namespace {

std::string Describe(const CodecSpec& spec, size_t numel, DType dtype) {
  return spec.ToString() + " of " + std::to_string(numel) + " " + std::string(Name(dtype));
}

}  // namespace

void KernelChecks::CheckEncode(const Encoding& c, const std::vector<float>& values) {
  const size_t numel = values.size();
  SCOPED_TRACE(Describe(c.spec, numel, c.dtype) + (c.feedback ? ", feedback" : "") +
               (c.momentum ? ", momentum" : ""));
  std::vector<uint8_t> gradient = Stored(values, c.dtype);
  std::vector<float> residual = Residuals(numel, numel);
  std::vector<float> velocity = Residuals(numel, numel + 1);
  const size_t bytes = EncodedBytes(c.spec, numel);
  std::vector<uint8_t> expected(bytes);
  OnDevice g = Put(gradient, c.skew * SizeOf(c.dtype));
  OnDevice r = Put(BytesOf(residual), c.skew * sizeof(float));
  OnDevice v = Put(BytesOf(velocity), c.skew * sizeof(float));
  OnDevice wire = Put(std::vector<uint8_t>(bytes, 0xAA));  // padding must be written as well

  EncodeArgs on_device{.gradient = {g.data(), numel, c.dtype}, .wire = wire.data()};
  EncodeArgs on_host = on_device;
  on_host.gradient.data = gradient.data();
  on_host.wire = expected.data();
  if (c.feedback) {
    on_device.residual = r.floats();
    on_host.residual = residual.data();
  }
  if (c.momentum) {
    on_device.momentum = {.beta = 0.9f, .velocity = v.floats()};
    on_host.momentum = {.beta = 0.9f, .velocity = velocity.data()};
  }
  backend().EncodeAll(c.spec, {&on_device, 1});
  ScalarBackend().EncodeAll(c.spec, {&on_host, 1});
  ASSERT_EQ(wire.Read(), expected);
  ASSERT_EQ(r.Read(), BytesOf(residual)) << "residuals";
  ASSERT_EQ(v.Read(), BytesOf(velocity)) << "the velocity is only read";
}

void KernelChecks::CheckDecode(const CodecSpec& spec, const std::vector<float>& values, DType dtype,
                               size_t skew) {
  const size_t numel = values.size();
  SCOPED_TRACE(Describe(spec, numel, dtype) + ", decoding");
  std::vector<float> gradient = values;
  std::vector<uint8_t> bytes(EncodedBytes(spec, numel));
  ScalarBackend().Encode(spec, {gradient.data(), numel}, nullptr, bytes.data());
  OnDevice wire = Put(bytes);

  std::vector<uint8_t> expected(numel * SizeOf(dtype));
  ScalarBackend().Decode(spec, bytes.data(), {expected.data(), numel, dtype});
  OnDevice out(*device_, *stream_, expected.size(), skew * SizeOf(dtype));
  backend().Decode(spec, wire.data(), {out.data(), numel, dtype});
  ASSERT_EQ(out.Read(), expected);
  if (dtype != DType::kF32) return;

  std::vector<float> sum = Residuals(numel, numel);
  for (size_t i = 0; i < numel; i += 3) sum[i] = -0.0f;  // an entry of 0 leaves it
  OnDevice added = Put(BytesOf(sum), skew * sizeof(float));
  backend().DecodeAdd(spec, wire.data(), {added.floats(), numel});
  ScalarBackend().DecodeAdd(spec, bytes.data(), sum);
  ASSERT_EQ(added.Read(), BytesOf(sum)) << "decode-add";
}

void KernelChecks::CheckReduce(const CodecSpec& up, const CodecSpec& down, size_t numel,
                               DType dtype, int ranks, int owner, const Damage& damage) {
  SCOPED_TRACE(Describe(up, numel, dtype) + ", reduced to " + down.ToString());
  std::vector<std::vector<uint8_t>> wires(ranks);
  std::vector<const uint8_t*> expected_wires(ranks), device_wires(ranks);
  std::vector<OnDevice> copies;
  copies.reserve(ranks);
  for (int r = 0; r < ranks; ++r) {
    if (r == owner) continue;
    // Only one rank has special blocks, so that they are combined with plain ones.
    std::vector<float> values =
        r == 0 ? Values(numel, kSeed + numel) : Residuals(numel, kSeed + 31 * numel + r);
    wires[r].resize(EncodedBytes(up, numel));
    ScalarBackend().Encode(up, {values.data(), numel}, nullptr, wires[r].data());
    if (r == 0 && damage) damage(wires[r].data());
    copies.push_back(Put(wires[r]));
    expected_wires[r] = wires[r].data();
    device_wires[r] = copies.back().data();
  }
  std::vector<uint8_t> own = Stored(Residuals(numel, kSeed + numel + 5), dtype);
  std::vector<float> residual = Residuals(numel, numel + 3);
  std::vector<uint8_t> out(own.size()), wire(EncodedBytes(down, numel));
  OnDevice device_own = Put(own), device_residual = Put(BytesOf(residual));
  OnDevice device_wire(*device_, *stream_, wire.size());
  const size_t floats = backend().ReduceScratchFloats(ranks, numel);
  OnDevice scratch(*device_, *stream_, floats * sizeof(float));

  ReduceArgs args;
  args.up = up;
  args.down = down;
  args.wires = expected_wires;
  args.own = {own.data(), numel, dtype};
  args.scale = 1.0f / static_cast<float>(ranks);
  args.residual = residual.data();
  args.out = {out.data(), numel, dtype};
  args.wire_out = wire.data();
  ScalarBackend().Reduce(args);
  args.wires = device_wires;
  args.own = args.out = {device_own.data(), numel, dtype};  // in place, as the engine does
  args.residual = device_residual.floats();
  args.scratch = {scratch.floats(), floats};
  args.wire_out = device_wire.data();
  backend().Reduce(args);
  ASSERT_EQ(device_wire.Read(), wire);
  ASSERT_EQ(device_own.Read(), out) << "the result";
  ASSERT_EQ(device_residual.Read(), BytesOf(residual)) << "residuals";
  scratch.Read();  // checks its guards
}

}  // namespace thinwire
