-- Ullage: refuses what can never fit. It runs under the controller's locks: it reads no file, starts no program and asks
-- nobody. What an estimate found is in the job's comment.

local SHARDS = @SHARDS@ -- of a GPU, by Slurm's name for its type; "" is the most that any has
local GPUS = @GPUS@ -- of a node, at most
local MEMORY = @MEMORY@ -- bytes of the largest GPU

local function problem_of(job)
   for _, asked in ipairs({job.tres_per_node or "", job.tres_per_job or "", job.tres_per_task or ""}) do
      for item in string.gmatch(asked, "[^,]+") do
         local plain = string.gsub(item, "^gres[:/]", "")
         local name = string.match(plain, "^([%w_]+)")
         local kind = string.match(plain, "^[%w_]+:([%w_.-]*[%a_.-][%w_.-]*)") or ""
         local count = tonumber(string.match(plain, "[:=](%d+)$") or "1")
         local most = SHARDS[string.lower(kind)] or SHARDS[""]
         if name == "shard" and count > most then
            return string.format("a job can ask for at most %d shards, which is a whole GPU, got %d", most, count)
         end
         if name == "gpu" and asked == job.tres_per_node and count > GPUS then
            return string.format("a job can ask for at most %d GPUs on a node, got %d", GPUS, count)
         end
      end
   end
   local upper = tonumber(string.match(job.comment or "", 'ullage:{.-"upper":(%d+)') or "0")
   if upper > MEMORY then
      local words = "the job can never run: it needs up to %.1f GiB on one GPU, and the largest here has %.1f GiB"
      return string.format(words, upper / 2^30, MEMORY / 2^30)
   end
   return nil
end

local function judge(job, tell)
   local done, problem = pcall(problem_of, job)
   if done and problem ~= nil then
      tell("ullage: %s", problem)
      return slurm.ERROR
   end
   return slurm.SUCCESS
end

function slurm_job_submit(job, partitions, user)
   return judge(job, slurm.log_user)
end

function slurm_job_modify(job, before, partitions, user)
   return judge(job, slurm.log_info) -- Slurm shows a user nothing here
end

return slurm.SUCCESS
